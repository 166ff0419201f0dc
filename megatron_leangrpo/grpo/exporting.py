# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Exports of a run: folders for diffusers, written from its checkpoints."""

from __future__ import annotations

from typing import Any

from megatron_leangrpo.grpo.architecture import Architecture
from megatron_leangrpo.models.loading import read_transformer_config


def transformer_config(architecture: Architecture) -> dict[str, Any] | None:
    """Diffusers' `config.json` of the transformer; None for a preset that has none."""
    family = architecture.family
    if architecture.base is not None:
        return read_transformer_config(architecture.base / "transformer", family.class_name)
    to_diffusers = family.to_diffusers_config
    return None if to_diffusers is None else to_diffusers(architecture.config)
