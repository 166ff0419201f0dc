# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Wan as a model family, of which only the sizes are there."""

from megatron_leangrpo.models.families import ModelFamily
from megatron_leangrpo.models.wan.config import PRESETS, WanConfig, from_diffusers_config
from megatron_leangrpo.models.wan.shape import PUBLISHED_COMPANIONS, wan_shape


def _describe(config: WanConfig) -> str:
    experts = f"{config.experts} x " if config.experts > 1 else ""
    return f"{experts}{config.num_layers} blocks, hidden {config.hidden_size}"


FAMILY = ModelFamily(
    class_name="WanTransformer3DModel",
    presets=PRESETS,
    from_diffusers_config=from_diffusers_config,
    build=None,
    weight_rules=None,
    describe=_describe,
    shape=wan_shape,
    companions=PUBLISHED_COMPANIONS,
)
