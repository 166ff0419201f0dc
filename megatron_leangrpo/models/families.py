# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a model family offers to a run, by name; its code is imported when it is asked for."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_leangrpo.models.common.config import TransformerSettings
from megatron_leangrpo.models.common.conversion import TensorInfo
from megatron_leangrpo.models.common.shape import Companions, TransformerShape
from megatron_leangrpo.models.common.weights import Rule

_FAMILIES = {
    "flux": "megatron_leangrpo.models.flux.family",
    "wan": "megatron_leangrpo.models.wan.family",
}


@dataclass(frozen=True)
class OriginalLayout:
    """The files of a model's authors, whose names and layout are not diffusers'."""

    marker: str
    """A tensor that tells them from diffusers'."""
    weight_rules: Callable[[Any], Sequence[Rule]]
    """A configuration to the table of its weights: ours and the authors'."""
    diffusers_config: Callable[
        [Mapping[str, TensorInfo], Mapping[str, Any]], tuple[dict[str, Any], list[str]]
    ]
    """Their tensors, and the `config.json` beside them or nothing, to diffusers' `config.json` and
    what was assumed for it."""


@dataclass(frozen=True)
class Part:
    """A number in the `config.json` of another part of a pipeline that the transformer fixes."""

    folder: str
    key: str
    name: str
    """Our field of the transformer's configuration."""
    factor: int = 1
    """How many times the number it is there."""


@dataclass(frozen=True)
class ModelFamily:
    """The entry points of one family; its configuration is a dataclass of its own."""

    class_name: str
    """Diffusers' name of the transformer in `config.json`."""
    presets: Mapping[str, Callable[..., TransformerSettings]]
    """Architectures by name; keyword arguments override fields."""
    from_diffusers_config: Callable[..., TransformerSettings]
    """A `config.json` and overrides to a configuration."""
    build: Callable[..., torch.nn.Module]
    """A configuration, and a pipeline stage where it is not this rank's, to this rank's share of
    the model, weights unset."""
    weight_rules: Callable[[Any], Sequence[Rule]]
    """A configuration to the table of its weights: ours and diffusers'."""
    describe: Callable[[Any], str]
    """A configuration in a few words."""
    to_diffusers_config: Callable[[Any], dict[str, Any]] | None = None
    """A configuration to the `config.json` with which diffusers builds the same architecture; None
    where only a base says it."""
    original: OriginalLayout | None = None
    """The authors' own files; None where they are diffusers' or are not read."""
    shape: Callable[[Any, int, int], TransformerShape] | None = None
    """A configuration, image tokens and text tokens to sizes; None cannot be planned."""
    companions: Companions = field(default_factory=Companions)
    """The other parts of a pipeline as published."""
    parts: tuple[Part, ...] = ()
    """Where the other parts of a pipeline say their widths."""
    vae_strides: Callable[[Mapping[str, Any]], dict[str, int]] = lambda vae: {}
    """The VAE's `config.json` to the strides of a configuration; ``KeyError`` where it has none."""
    pipeline_fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda index: {}
    """A pipeline's `model_index.json` to those fields of a configuration that it holds."""
    lora_targets: tuple[str, ...] = ()
    """The projections that published LoRA recipes adapt, by the ends of diffusers' names."""


def family_names() -> list[str]:
    """The names of all families."""
    return list(_FAMILIES)


def model_family(name: str) -> ModelFamily:
    """Return a family by name."""
    return importlib.import_module(_FAMILIES[name]).FAMILY


def find_preset(family: ModelFamily, name: str) -> Callable[..., Any]:
    """Return a preset by name; ``ValueError`` names the known ones."""
    if name not in family.presets:
        raise ValueError(f"model.preset = {name!r} is not one of {sorted(family.presets)}")
    return family.presets[name]
