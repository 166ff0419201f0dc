# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Wan's sizes: presets, parameter counts, and diffusers' configuration files."""

import pytest
import torch

from megatron_leangrpo.models.flux import config as flux_config
from megatron_leangrpo.models.flux.shape import count_parameters as count_flux
from megatron_leangrpo.models.wan.config import (
    PRESETS,
    WanConfig,
    from_diffusers_config,
    to_diffusers_config,
    wan_tiny,
)
from megatron_leangrpo.models.wan.shape import count_parameters, wan_shape


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("wan21_1.3b", 1_418_996_800),
        ("wan21_14b", 14_288_491_584),
        ("wan21_i2v_14b", 16_394_878_784),
        ("wan22_a14b", 2 * 14_288_491_584),
        ("wan22_5b", 4_999_787_712),
    ],
)
def test_presets_have_the_published_sizes(preset, parameters):
    assert count_parameters(PRESETS[preset]()) == parameters


def test_flux_is_counted_without_a_model():
    assert count_flux(flux_config.flux_dev()) == 11_901_408_320


@pytest.mark.parametrize("changes", [{}, {"image_dim": 32, "in_channels": 36}])
def test_diffusers_builds_as_many_parameters(changes):
    from diffusers import WanTransformer3DModel

    config = wan_tiny(**changes)
    settings = to_diffusers_config(config)
    settings.pop("_class_name")
    with torch.device("meta"):
        model = WanTransformer3DModel(**settings)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(config)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_configuration_survives_diffusers_file(preset):
    config = PRESETS[preset]()
    pipeline = {"experts": config.experts, "expert_boundary": config.expert_boundary}
    assert from_diffusers_config(to_diffusers_config(config), **pipeline) == config


def test_another_norm_or_patch_is_refused():
    with pytest.raises(ValueError, match="qk_norm is rms_norm"):
        from_diffusers_config({"qk_norm": "rms_norm"})
    with pytest.raises(ValueError, match="patch_size"):
        from_diffusers_config({"patch_size": [2, 2, 2]})


def test_a_tensor_parallel_size_that_cuts_a_head_names_those_that_do_not():
    with pytest.raises(ValueError, match="valid values: 1, 2, 3, 4, 6, 12"):
        PRESETS["wan21_1.3b"](tensor_model_parallel_size=8)


def test_shards_and_what_every_rank_holds_add_up():
    config = WanConfig()
    shape = wan_shape(config, video_tokens=32760, text_tokens=512)
    assert shape.parameters_of_rank(1) == shape.parameters == count_parameters(config)
    assert shape.parameters_of_rank(8) == (
        shape.sharded_parameters // 8 + shape.replicated_parameters
    )
