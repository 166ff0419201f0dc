# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What PEFT and diffusers say of an adapter beside its tensors: ranks, alphas, projections."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_leangrpo.models.common.lora_targets import LowRank

_Value = TypeVar("_Value")

METADATA = "lora_adapter_metadata"
"""Where diffusers keeps it in a safetensors file."""
FIRST, SECOND = "transformer", "transformer_2"
"""Diffusers' names of a pipeline's transformers; the second is Wan 2.2's."""


def read_metadata(file: Path, setting: str) -> dict[str, dict[str, Any]]:
    """What diffusers has written about each transformer's adapters; nothing where it has not."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as handle:
        text = (handle.metadata() or {}).get(METADATA, "{}")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{setting}: {file}: its {METADATA} is no JSON object")
    configs: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        component, _, name = key.rpartition(".")
        configs.setdefault(component or FIRST, {})[name] = value
    return configs


def check_plain(config: Mapping[str, Any], file: Path, setting: str) -> None:
    """Refuse what PEFT says of an adapter that is no plain one."""
    kind = str(config.get("peft_type") or "LORA")
    other = next((k for k in ("use_dora", "lora_bias", "use_qalora") if config.get(k)), None)
    if kind.upper() != "LORA" or other:
        what = other or f"peft_type {kind}"
        raise ValueError(f"{setting}: {file} is no plain LoRA ({what}); only those can be read")


def stated_alpha(projection: str, rank: int, configs: Mapping[str, Mapping[str, Any]]) -> float:
    """The alpha that gives PEFT's strength; without any statement alpha is the rank."""
    component, bare = component_of(projection)
    config = configs.get(component or FIRST, {})
    try:
        patterns = config.get("alpha_pattern") or {}
        found = (v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", bare))
        alpha = next(found, config.get("lora_alpha"))
        if alpha is None:
            return float(rank)
        return float(alpha) * (math.sqrt(rank) if config.get("use_rslora") else 1)
    except (AttributeError, TypeError, ValueError, re.error) as error:
        raise ValueError(f"lora_alpha and alpha_pattern of {projection}: {error}") from error


def component_of(name: str) -> tuple[str, str]:
    """The transformer that stands before a name, or nothing, and the name without it."""
    component = next((c for c in (FIRST, SECOND) if name.startswith(f"{c}.")), "")
    return component, name.removeprefix(f"{component}.")


def by_component(named: Mapping[str, _Value]) -> dict[str, dict[str, _Value]]:
    """What belongs to each of a pipeline's transformers by name there; "" is the only one."""
    components: dict[str, dict[str, _Value]] = {}
    for name, value in named.items():
        component, bare = component_of(name)
        components.setdefault(component, {})[bare] = value
    return components


def names_in_file(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of one transformer as diffusers' pipelines want them named.

    The second's bear the first one's name, too: who loads a file says which of them it is for.
    """
    return {f"{FIRST}.{name}": tensor for name, tensor in tensors.items()}


def metadata_for_diffusers(projections: Mapping[str, LowRank]) -> dict[str, str]:
    """What diffusers reads rank and alpha from: PEFT's configuration of the transformer."""
    config = {f"{FIRST}.{key}": value for key, value in _peft_config(projections).items()}
    return {METADATA: json.dumps(config, indent=2, sort_keys=True)}


def _peft_config(projections: Mapping[str, LowRank]) -> dict[str, Any]:
    ranks = [low.rank for low in projections.values()]
    alphas = [low.alpha for low in projections.values()]
    rank, alpha = max(ranks, key=ranks.count), max(alphas, key=alphas.count)
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {n: low.rank for n, low in projections.items() if low.rank != rank},
        "alpha_pattern": {n: low.alpha for n, low in projections.items() if low.alpha != alpha},
        "target_modules": sorted(projections),
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
    }
