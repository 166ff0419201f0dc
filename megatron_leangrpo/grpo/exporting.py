# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Exports of a run: folders for diffusers, written from its checkpoints a tensor at a time.

A checkpoint holds full tensors in any layout, so that one process can export it while the ranks
train on.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_leangrpo.checkpoint.stored import StoredTensors
from megatron_leangrpo.files import atomic_write
from megatron_leangrpo.grpo.architecture import Architecture
from megatron_leangrpo.models.common.conversion import (
    Converted,
    Renamed,
    TensorInfo,
    TensorSource,
)
from megatron_leangrpo.models.common.weights import Rule
from megatron_leangrpo.models.experts import of_one
from megatron_leangrpo.models.loading import read_transformer_config
from megatron_leangrpo.models.saving import save_lora_folder, save_transformer_folder

CARD = "README.md"
_SETTING = "checkpoint.export_interval"


def transformer_config(
    architecture: Architecture, folder: str = "transformer"
) -> dict[str, Any] | None:
    """Diffusers' `config.json` of the transformer; None for a preset that has none."""
    family = architecture.family
    if architecture.base is not None:
        return read_transformer_config(architecture.base / folder, family.class_name)
    to_diffusers = family.to_diffusers_config
    return None if to_diffusers is None else to_diffusers(architecture.config)


def can_export(architecture: Architecture) -> bool:
    """Whether diffusers knows the architecture."""
    return transformer_config(architecture) is not None


def export_checkpoint(
    checkpoint: Path,
    folder: Path,
    architecture: Architecture,
    adapter_rules: Sequence[Rule] | None,
    average: bool,
    card: str,
) -> None:
    """Write the weights of a checkpoint, or their average, and a model card for diffusers.

    `adapter_rules` are those of the architecture where adapters are trained. The folder appears
    when it is complete. ``ValueError`` where the disk has too little space.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    stored = StoredTensors(checkpoint, average)
    if adapter_rules is not None:
        projections = architecture.adaptation.projections
        tensors = Converted(_chosen(stored, adapter_rules), adapter_rules, to_ours=False)
        save_lora_folder(temporary, projections, dict(tensors), setting=_SETTING)
    else:
        weights = _InDtype(stored, architecture.config.params_dtype)
        rules, folders = architecture.weight_rules, architecture.config.transformer_folders
        tensors = Converted(_chosen(weights, rules), rules, to_ours=False)
        for name in folders:
            own = tensors if len(folders) == 1 else of_one(tensors, name)
            config = transformer_config(architecture, name)
            save_transformer_folder(temporary / name, config, own, setting=_SETTING)
    atomic_write(temporary / CARD, card)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def _chosen(source: TensorSource, rules: Sequence[Rule]) -> TensorSource:
    """Our tensors of some rules alone."""
    names = [name for rule in rules for name in rule.ours]
    return Renamed(source, dict(zip(names, names)))


class _InDtype(TensorSource):
    """Tensors of another source in one dtype: an average is wider than the model."""

    def __init__(self, source: TensorSource, dtype: torch.dtype) -> None:
        self._source, self._dtype = source, dtype

    @property
    def layout(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        return {
            name: TensorInfo(info.shape, self._dtype) for name, info in self._source.layout.items()
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._source[name].to(self._dtype)
