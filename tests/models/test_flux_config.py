# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Presets, parameter counts, and configurations that cannot be."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_leangrpo.models.common.weights import full_shapes
from megatron_leangrpo.models.flux.config import (
    PRESETS,
    flux_bench,
    flux_dev,
    flux_tiny,
    from_diffusers_config,
    to_diffusers_config,
)
from megatron_leangrpo.models.flux.model import FluxTransformer
from megatron_leangrpo.models.flux.weight_map import weight_rules


def _meta_model(config) -> FluxTransformer:
    with torch.device("meta"):
        return FluxTransformer(config)


def test_flux_dev_has_the_published_parameters_and_tensors():
    model = _meta_model(flux_dev())
    shapes = full_shapes(model, weight_rules(model.flux_config))
    assert len(shapes) == 1160
    assert sum(shape.numel() for shape in shapes.values()) == 11_901_408_320
    assert all(parameter.is_meta for parameter in model.parameters())


def test_full_shapes_are_those_of_diffusers_model():
    from diffusers import FluxTransformer2DModel

    for config in (flux_tiny(), flux_bench(), flux_tiny(guidance_embeds=False)):
        arguments = {k: v for k, v in to_diffusers_config(config).items() if not k.startswith("_")}
        with torch.device("meta"):
            theirs = FluxTransformer2DModel(**arguments).state_dict()
        ours = full_shapes(_meta_model(config), weight_rules(config))
        assert ours == {name: tensor.shape for name, tensor in theirs.items()}


@pytest.mark.parametrize("preset", PRESETS)
def test_configuration_survives_the_way_to_diffusers_and_back(preset):
    config = PRESETS[preset](params_dtype=torch.bfloat16, recompute_granularity="full")
    overrides = {"params_dtype": torch.bfloat16, "recompute_granularity": "full"}
    assert from_diffusers_config(to_diffusers_config(config), **overrides) == config


def test_absent_keys_mean_diffusers_defaults():
    config = from_diffusers_config({"_class_name": "FluxTransformer2DModel"})
    assert config == flux_dev(guidance_embeds=False)


def test_tensor_parallel_size_that_does_not_divide_the_heads_is_refused_with_valid_ones():
    message = r"parallel\.tensor_model_parallel_size is 5, .* 24 .*: 1, 2, 3, 4, 6, 8, 12, 24"
    with pytest.raises(ValueError, match=message):
        flux_dev(tensor_model_parallel_size=5)


def test_other_impossible_configurations_are_refused():
    with pytest.raises(ValueError, match=r"recompute_granularity is 'some'; valid values: none"):
        flux_tiny(recompute_granularity="some")
    with pytest.raises(ValueError, match=r"axes_dims_rope \(8, 8, 6\).*24"):
        flux_tiny(axes_dims_rope=(8, 8, 6))
    with pytest.raises(ValueError, match="hidden_size 97"):
        flux_tiny(hidden_size=97)
    with pytest.raises(ValueError, match="patch_size is 2"):
        from_diffusers_config({"patch_size": 2})


def test_megatron_neither_scales_nor_averages_our_gradients():
    config = flux_tiny(tensor_model_parallel_size=2, sequence_parallel=True).transformer_config()
    assert config.calculate_per_token_loss and config.qk_layernorm and config.sequence_parallel
    assert config.hidden_dropout == config.attention_dropout == 0.0
    alone = dataclasses.replace(flux_tiny(), sequence_parallel=True).transformer_config()
    assert not alone.sequence_parallel
