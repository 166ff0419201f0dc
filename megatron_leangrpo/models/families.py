# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a model family offers to a run, by name; its code is imported when it is asked for."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_FAMILIES = {"flux": "megatron_leangrpo.models.flux.family"}


@dataclass(frozen=True)
class ModelFamily:
    """The entry points of one family; a configuration is the family's own dataclass.

    It has `in_channels`, `params_dtype`, `tensor_model_parallel_size`, `guidance_embeds`,
    `joint_attention_dim`, `pooled_projection_dim` and `parameters_per_rank`.
    """

    class_name: str
    """Diffusers' name of the transformer in `config.json`."""
    presets: Mapping[str, Callable[..., Any]]
    """Architectures by name; keyword arguments override fields."""
    from_diffusers_config: Callable[..., Any]
    """A `config.json` and overrides to a configuration."""
    build: Callable[[Any], torch.nn.Module]
    """A configuration to this rank's share of the model, weights unset."""
    initialise: Callable[[torch.nn.Module, int], None]
    """Fill with random weights from a seed, the same in every layout."""
    load: Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], None]
    """Fill from full tensors under diffusers' names."""
    export_gradients: Callable[[torch.nn.Module], dict[str, torch.Tensor]]
    """Full gradients under diffusers' names (a collective)."""
    describe: Callable[[Any], str]
    """The architecture in a few words."""


def model_family(name: str) -> ModelFamily:
    """Return a family by name."""
    return importlib.import_module(_FAMILIES[name]).FAMILY


def find_preset(family: ModelFamily, name: str) -> Callable[..., Any]:
    """Return a preset by name; ``ValueError`` names the known ones."""
    if name not in family.presets:
        raise ValueError(f"model.preset = {name!r} is not one of {sorted(family.presets)}")
    return family.presets[name]
