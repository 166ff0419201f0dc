# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which transformer a run has trained, from the configuration in its directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.config_reader import read_config, read_recipe
from megatron_leangrpo.grpo.assets import resolve_asset
from megatron_leangrpo.models.families import find_preset, model_family
from megatron_leangrpo.models.loading import CONFIG, read_transformer_config


def run_config(checkpoint: Path, setting: str) -> RunConfig:
    """The configuration of the run that a checkpoint is of."""
    recipe = checkpoint.absolute().parent.parent / "config.yaml"
    if not recipe.is_file():
        raise ValueError(
            f"{setting}: {checkpoint} does not say which model it is: there is neither {recipe} "
            f"nor a {CONFIG} in it; put the transformer's {CONFIG} there"
        )
    return read_config(read_recipe(str(recipe)), [])


def run_transformer(checkpoint: Path, setting: str) -> tuple[str, dict[str, Any]]:
    """The family and diffusers' `config.json` of the model in a run's checkpoint.

    ``ValueError`` where the run's configuration or its base is not there any more.
    """
    model = run_config(checkpoint, setting).model
    family = model_family(model.family)
    if model.base is None and family.to_diffusers_config is None:
        raise ValueError(
            f"{setting}: a preset of {model.family} has no {CONFIG}; put one into {checkpoint}"
        )
    if model.base is None:
        return model.family, family.to_diffusers_config(find_preset(family, model.preset)())
    base = resolve_asset(model.base)
    if base is None:
        raise ValueError(
            f"{setting}: the base of the run, {model.base}, is not there; put its "
            f"transformer/{CONFIG} into {checkpoint}"
        )
    return model.family, read_transformer_config(base / "transformer", family.class_name, setting)
