# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""FLUX as a model family."""

from megatron_leangrpo.models.families import ModelFamily
from megatron_leangrpo.models.flux.config import PRESETS, FluxConfig, from_diffusers_config
from megatron_leangrpo.models.flux.model import FluxTransformer
from megatron_leangrpo.models.flux.weight_map import weight_rules
from megatron_leangrpo.models.loading import FLUX_CLASS


def _describe(config: FluxConfig) -> str:
    return (
        f"{config.num_double_blocks} double + {config.num_single_blocks} single blocks, "
        f"hidden {config.hidden_size}"
    )


FAMILY = ModelFamily(
    class_name=FLUX_CLASS,
    presets=PRESETS,
    from_diffusers_config=from_diffusers_config,
    build=FluxTransformer,
    weight_rules=weight_rules,
    describe=_describe,
)
