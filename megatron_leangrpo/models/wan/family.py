# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Wan as a model family."""

import torch

from megatron_leangrpo.models.families import ModelFamily, OriginalLayout
from megatron_leangrpo.models.wan import original
from megatron_leangrpo.models.wan.config import (
    PRESETS,
    WanConfig,
    from_diffusers_config,
    to_diffusers_config,
)
from megatron_leangrpo.models.wan.shape import PUBLISHED_COMPANIONS, wan_shape
from megatron_leangrpo.models.wan.weight_map import weight_rules


def _build(config: WanConfig) -> torch.nn.Module:
    # megatron-core takes seconds to import, and planning needs none of it.
    from megatron_leangrpo.models.wan.model import WanTransformer

    return WanTransformer(config)


def _describe(config: WanConfig) -> str:
    experts = f"{config.experts} x " if config.experts > 1 else ""
    return f"{experts}{config.num_layers} blocks, hidden {config.hidden_size}"


FAMILY = ModelFamily(
    class_name="WanTransformer3DModel",
    presets=PRESETS,
    from_diffusers_config=from_diffusers_config,
    build=_build,
    weight_rules=weight_rules,
    describe=_describe,
    to_diffusers_config=to_diffusers_config,
    original=OriginalLayout(
        marker=original.MARKER,
        weight_rules=original.weight_rules,
        diffusers_config=original.diffusers_config,
    ),
    shape=wan_shape,
    companions=PUBLISHED_COMPANIONS,
    is_wired=False,
)
