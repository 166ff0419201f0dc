# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Weights that a run starts from, checked against its model before any is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_leangrpo.checkpoint.store import MANIFEST, checkpoints
from megatron_leangrpo.checkpoint.stored import StoredTensors
from megatron_leangrpo.models.common.config import TransformerSettings
from megatron_leangrpo.models.common.weights import ADAPTER, full_shape
from megatron_leangrpo.models.loading import CONFIG, read_json

SETTING = "model.weights"
_SHOWN = 3


def find_weights(name: str) -> Path:
    """The checkpoint that `model.weights` names; ``ValueError`` where there is none."""
    path = Path(name)
    if (path / MANIFEST).is_file():
        return path
    steps = [step.name for _, step in checkpoints(path / "checkpoints")]
    if steps:
        known = ", ".join(steps[:_SHOWN])
        raise ValueError(f"{SETTING} = {name!r} is a run; give one of its checkpoints: {known}")
    what = f"is no checkpoint (no {MANIFEST} in it)" if path.exists() else "does not exist"
    raise ValueError(
        f"{SETTING} = {name!r} {what}; give a checkpoint that `python -m checkpoints_tools import` "
        "has made, or a checkpoint of a run"
    )


def check_architecture(
    checkpoint: Path,
    settings: TransformerSettings,
    class_name: str,
    from_diffusers_config: Callable[[Mapping[str, Any]], TransformerSettings],
) -> None:
    """Raise ``ValueError`` where a checkpoint says that it is another architecture.

    Tensors of the same shapes can belong to another number of heads.
    """
    if not (checkpoint / CONFIG).is_file():
        return
    config = read_json(checkpoint / CONFIG, SETTING)
    found = config.get("_class_name")
    if found != class_name:
        raise ValueError(f"{SETTING}: {checkpoint} holds a {found}; this run needs a {class_name}")
    other = from_diffusers_config(config)
    different = [
        f"{field.name} {getattr(other, field.name)} instead of {getattr(settings, field.name)}"
        for field in dataclasses.fields(settings)
        if getattr(other, field.name) != getattr(settings, field.name)
    ]
    if different:
        raise ValueError(
            f"{SETTING}: {checkpoint} is of another model than model.base or model.preset: "
            f"{', '.join(different)}"
        )


def check_tensors(checkpoint: Path, model: torch.nn.Module) -> None:
    """Raise ``ValueError`` unless a checkpoint holds the weights of `model`, by name and shape."""
    stored = StoredTensors(checkpoint).layout
    if any(ADAPTER in name for name in stored):
        raise ValueError(
            f"{SETTING}: {checkpoint} holds adapters alone; export them with `python -m "
            "checkpoints_tools export` and give the file as lora.path"
        )
    expected = {name: full_shape(parameter) for name, parameter in model.named_parameters()}
    wrong = [f"{name} is missing" for name in expected if name not in stored]
    wrong += [f"{name} is unknown" for name in stored if name not in expected]
    wrong += [
        f"{name} has shape {stored[name].shape} instead of {shape}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    if wrong:
        raise ValueError(
            f"{SETTING}: {checkpoint} holds the weights of another model: {_first_few(wrong)}"
        )


def _first_few(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more
