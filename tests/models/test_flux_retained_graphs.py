# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Several forwards before the first backward, as a rollout that keeps its graphs makes them."""

from __future__ import annotations

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.flux.model import FluxTransformer
from megatron_leangrpo.models.flux.weight_map import export_diffusers_gradients, initialise
from tests.models.flux_parity import (
    Inputs,
    finalize_gradients,
    make_inputs,
    relative_l2,
    small_config,
    worst,
    wrap_data_parallel,
)

# The same float32 kernels on the same numbers; only the order of accumulation differs.
TOLERANCE = 1e-6


def _gradients(wrapped: torch.nn.Module, batches: list[Inputs], retained: bool) -> dict:
    wrapped.zero_grad_buffer()

    def forward(inputs: Inputs) -> torch.Tensor:
        return wrapped(inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)

    if retained:
        velocities = [forward(inputs) for inputs in batches]
        with torch.no_grad():
            forward(batches[0])
        for velocity, inputs in zip(velocities, batches):
            velocity.backward(inputs.velocity_grad)
    else:
        for inputs in reversed(batches):
            forward(inputs).backward(inputs.velocity_grad)
    finalize_gradients(wrapped)
    return export_diffusers_gradients(wrapped)


def _both_ways() -> list[tuple[float, str]]:
    platform.initialize_distributed(2)
    return [_retained_against_immediate(False, "none"), _retained_against_immediate(True, "full")]


def _retained_against_immediate(sequence_parallel: bool, recompute: str) -> tuple[float, str]:
    config = small_config(
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        recompute_granularity=recompute,
    )
    model = FluxTransformer(config)
    initialise(model, seed=3)
    # Different sizes, so that a buffer shared between forwards would be resized and overwritten.
    batches = [
        make_inputs(config, seed=1),
        make_inputs(config, seed=2),
        make_inputs(config, seed=3, grid=(4, 4), text_tokens=8, batch=3),
    ]
    wrapped = wrap_data_parallel(model)
    immediate = _gradients(wrapped, batches, retained=False)
    return worst(_gradients(wrapped, batches, retained=True), immediate)


def test_retained_graphs_give_the_gradients_of_immediate_backwards(run_ranks):
    for errors in run_ranks(2, _both_ways):
        for error, name in errors:
            assert error < TOLERANCE, name


def test_rollout_in_inference_mode_does_not_spoil_a_later_backward():
    config = small_config()
    model = FluxTransformer(config)
    initialise(model, seed=3)
    inputs = make_inputs(config, grid=(2, 9))
    arguments = (inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)
    with torch.inference_mode():
        rollout = model(*arguments).clone()
    velocity = model(*arguments)
    velocity.backward(inputs.velocity_grad)
    assert relative_l2(velocity, rollout) == 0.0
