# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Wan against diffusers' own model: the output and the gradient of every parameter."""

from __future__ import annotations

import pytest

from megatron_leangrpo.models.wan.model import WanTransformer
from tests.models.flux_parity import relative_l2, worst
from tests.models.wan_parity import (
    TOLERANCE,
    gradients,
    image_to_video,
    load,
    make_inputs,
    reference,
    text_to_video,
    unpack,
)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (text_to_video(), {}),
        (image_to_video(), {}),
        # A picture beside the video and not beside the text, as in Wan 2.2.
        (text_to_video(in_channels=8), {}),
        (text_to_video(), {"per_token": True}),
    ],
    ids=["text", "picture", "picture's latents alone", "timesteps per token"],
)
def test_output_and_every_gradient_match_diffusers_on_one_rank(config, options):
    inputs = make_inputs(config, **options)
    expected = reference(config, inputs)
    model = WanTransformer(config)
    load(model, expected["weights"])
    velocity = model(inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)
    assert relative_l2(unpack(velocity, inputs.grid), expected["velocity"]) < TOLERANCE
    velocity.backward(inputs.velocity_grad)
    error, name = worst(gradients(model), expected["gradients"])
    assert error < TOLERANCE, name
