# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""FLUX against diffusers' own model: the output and the gradient of every parameter."""

from __future__ import annotations

import pytest
import torch

from megatron_leangrpo.models.flux.model import FluxTransformer
from megatron_leangrpo.models.flux.weight_map import (
    export_diffusers_gradients,
    load_diffusers_state_dict,
)
from tests.models.flux_parity import (
    TOLERANCE,
    make_inputs,
    reference,
    relative_l2,
    small_config,
    worst,
)


@pytest.mark.parametrize("guidance", [True, False])
def test_output_and_every_gradient_match_diffusers_on_one_rank(guidance):
    config = small_config(guidance_embeds=guidance)
    inputs = make_inputs(config)
    expected = reference(config, inputs)
    model = FluxTransformer(config)
    load_diffusers_state_dict(model, expected["weights"])
    velocity = model(inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)
    assert relative_l2(velocity, expected["velocity"]) < TOLERANCE
    velocity.backward(inputs.velocity_grad)
    error, name = worst(export_diffusers_gradients(model), expected["gradients"])
    assert error < TOLERANCE, name


def test_float64_stays_float64():
    config = small_config(params_dtype=torch.float64)
    inputs = make_inputs(config, dtype=torch.float64)
    expected = reference(small_config(), make_inputs(small_config()))
    model = FluxTransformer(config)
    load_diffusers_state_dict(model, expected["weights"])

    def velocity(shift: float) -> torch.Tensor:
        return model(inputs.latents + shift, inputs.timestep, inputs.prompt, inputs.grid)

    assert velocity(0.0).dtype == torch.float64
    # A float32 step anywhere inside would leave 1e-7 / 1e-4 = 1e-3 of noise in the slopes.
    slopes = [(velocity(h) - velocity(-h)) / (2 * h) for h in (1e-4, 2e-4)]
    assert relative_l2(slopes[0], slopes[1]) < 1e-6
