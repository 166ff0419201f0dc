# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""FLUX as a model family."""

import torch

from megatron_leangrpo.models.families import ModelFamily, OriginalLayout, Part
from megatron_leangrpo.models.flux import original
from megatron_leangrpo.models.flux.config import (
    PRESETS,
    FluxConfig,
    from_diffusers_config,
    to_diffusers_config,
)
from megatron_leangrpo.models.flux.shape import PUBLISHED_COMPANIONS, flux_shape
from megatron_leangrpo.models.flux.weight_map import weight_rules
from megatron_leangrpo.models.loading import FLUX_CLASS
from megatron_leangrpo.pipeline.stages import Stage


def _build(config: FluxConfig, stage: Stage | None = None) -> torch.nn.Module:
    # megatron-core takes seconds to import, and planning needs none of it.
    from megatron_leangrpo.models.flux.model import FluxTransformer

    return FluxTransformer(config, stage)


def _describe(config: FluxConfig) -> str:
    return (
        f"{config.num_double_blocks} double + {config.num_single_blocks} single blocks, "
        f"hidden {config.hidden_size}"
    )


FAMILY = ModelFamily(
    class_name=FLUX_CLASS,
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
    shape=flux_shape,
    companions=PUBLISHED_COMPANIONS,
    parts=(
        Part("vae", "latent_channels", "in_channels", factor=4),
        Part("text_encoder", "hidden_size", "pooled_projection_dim"),
        Part("text_encoder_2", "d_model", "joint_attention_dim"),
    ),
    vae_strides=lambda vae: {"spatial_stride": 2 ** (len(vae["block_out_channels"]) - 1)},
    # Flow-GRPO's: all of the double blocks, and q, k, v of the single ones.
    lora_targets=tuple(f"attn.to_{part}" for part in ("q", "k", "v", "out.0", "add_out"))
    + tuple(f"attn.add_{part}_proj" for part in "qkv")
    + tuple(f"{ff}.net.{part}" for ff in ("ff", "ff_context") for part in ("0.proj", "2")),
)
