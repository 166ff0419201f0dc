# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Wan as a model family."""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_leangrpo.models.families import ModelFamily, OriginalLayout, Part
from megatron_leangrpo.models.wan import original
from megatron_leangrpo.models.wan.config import (
    PRESETS,
    WanConfig,
    from_diffusers_config,
    to_diffusers_config,
)
from megatron_leangrpo.models.wan.shape import PUBLISHED_COMPANIONS, wan_shape
from megatron_leangrpo.models.wan.weight_map import weight_rules
from megatron_leangrpo.pipeline.stages import Stage


def _build(config: WanConfig, stage: Stage | None = None) -> torch.nn.Module:
    # megatron-core takes seconds to import, and planning needs none of it.
    from megatron_leangrpo.models.wan.model import WanTransformer

    return WanTransformer(config, stage)


def _describe(config: WanConfig) -> str:
    experts = f"{config.experts} x " if config.experts > 1 else ""
    return f"{experts}{config.num_layers} blocks, hidden {config.hidden_size}"


def _vae_strides(vae: Mapping[str, Any]) -> dict[str, int]:
    # Wan 2.1's published file has neither key; the defaults are diffusers'.
    return {
        "spatial_stride": vae.get("scale_factor_spatial", 8),
        "temporal_stride": vae.get("scale_factor_temporal", 4),
    }


def _pipeline_fields(index: Mapping[str, Any]) -> dict[str, Any]:
    # A boundary alone means nothing: diffusers' converter wrote one for Wan 2.1, too.
    if (index.get("transformer_2") or [None, None])[1] is None:
        return {}
    return {"experts": 2, "expert_boundary": index.get("boundary_ratio")}


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
    parts=(
        Part("vae", "z_dim", "out_channels"),
        Part("text_encoder", "d_model", "joint_attention_dim"),
    ),
    vae_strides=_vae_strides,
    pipeline_fields=_pipeline_fields,
    # Flow-GRPO's.
    lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
)
