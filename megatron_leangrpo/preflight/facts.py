# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a rank says of itself, and where ranks differ."""

import dataclasses
import hashlib
import json
import os
import platform as python_platform
import socket
from collections.abc import Sequence
from pathlib import Path

import torch

import megatron_leangrpo
from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.info import gpu_lines, version_of
from megatron_leangrpo.preflight.result import Check

PACKAGES = ("torch", "megatron-core", "transformer-engine", "diffusers", "transformers")
NOT_SET = "none"


def own_facts(config: RunConfig) -> dict[str, str]:
    """Versions and devices of this rank; every entry but `host` must be equal on all ranks."""
    gpus = gpu_lines()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    name, driver = NOT_SET, NOT_SET
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(local)
        name = f"{properties.name}, {properties.total_memory >> 20} MiB"
        driver = gpus[0].rsplit(", ", 1)[-1] if gpus else NOT_SET
    return {
        "host": socket.gethostname(),
        "python": python_platform.python_version(),
        **{package: version_of(package) or NOT_SET for package in PACKAGES},
        "CUDA of torch": torch.version.cuda or NOT_SET,
        "GPU": name,
        "driver": driver,
        "code of megatron_leangrpo": code_digest(),
        "settings of the run": _settings_digest(config),
    }


def code_digest() -> str:
    """A digest of the package's sources: says more than a commit, also of an installed copy."""
    root = Path(megatron_leangrpo.__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*root.rglob("*.py"), *root.glob("recipes/*.yaml")]):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _settings_digest(config: RunConfig) -> str:
    text = json.dumps(dataclasses.asdict(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def agreement(facts: Sequence[dict[str, str]]) -> list[Check]:
    """One check for each fact; where ranks differ it says which hosts have what."""
    checks = []
    for name in facts[0]:
        if name == "host":
            continue
        hosts: dict[str, set[str]] = {}
        for own in facts:
            hosts.setdefault(own[name], set()).add(own["host"])
        if len(hosts) == 1:
            checks.append(Check(name, True, next(iter(hosts))))
        else:
            found = "; ".join(f"{value} on {', '.join(sorted(h))}" for value, h in hosts.items())
            checks.append(Check(name, False, f"differs: {found}"))
    return checks
