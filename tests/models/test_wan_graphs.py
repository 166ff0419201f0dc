# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What Wan's graphs keep: recomputation, and several forwards before the first backward."""

from __future__ import annotations

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.common.weights import initialise
from megatron_leangrpo.models.wan.model import WanTransformer
from megatron_leangrpo.models.wan.weight_map import weight_rules
from tests.models.flux_parity import finalize_gradients, relative_l2, worst, wrap_data_parallel
from tests.models.wan_parity import Inputs, gradients, image_to_video, make_inputs

GRANULARITIES = ("none", "selective", "full")
# The same float32 kernels on the same numbers; only the order of accumulation differs.
TOLERANCE = 1e-6


def _wrapped(ranks: int, recompute: str) -> torch.nn.Module:
    platform.initialize_distributed(ranks)
    config = image_to_video(
        tensor_model_parallel_size=ranks, sequence_parallel=True, recompute_granularity=recompute
    )
    model = WanTransformer(config)
    initialise(model, weight_rules(config), seed=5)
    return wrap_data_parallel(model)


def _forward(model: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    return model(inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)


def _saved_bytes_and_gradients(ranks: int) -> dict[str, tuple[int, torch.Tensor, dict]]:
    results = {}
    for granularity in GRANULARITIES:
        wrapped = _wrapped(ranks, granularity)
        weights = {p.untyped_storage().data_ptr() for p in wrapped.parameters()}
        storages: dict[int, int] = {}

        def keep(tensor, storages=storages, weights=weights):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        inputs = make_inputs(image_to_video())
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            velocity = _forward(wrapped, inputs)
        velocity.backward(inputs.velocity_grad)
        finalize_gradients(wrapped)
        saved = sum(storages.values())
        results[granularity] = (saved, velocity.detach(), gradients(wrapped))
    return results


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_recomputation_is_bitwise_and_keeps_less(run_ranks, ranks):
    for results in run_ranks(ranks, _saved_bytes_and_gradients, ranks):
        saved_none, velocity, expected = results["none"]
        for granularity in ("selective", "full"):
            assert torch.equal(results[granularity][1], velocity)
            other = results[granularity][2]
            assert all(torch.equal(other[name], expected[name]) for name in expected), granularity
        assert results["full"][0] < results["selective"][0] < saved_none


def _gradients_of(wrapped: torch.nn.Module, batches: list[Inputs], retained: bool) -> dict:
    wrapped.zero_grad_buffer()
    if retained:
        velocities = [_forward(wrapped, inputs) for inputs in batches]
        with torch.no_grad():
            _forward(wrapped, batches[0])
        for velocity, inputs in zip(velocities, batches):
            velocity.backward(inputs.velocity_grad)
    else:
        for inputs in reversed(batches):
            _forward(wrapped, inputs).backward(inputs.velocity_grad)
    finalize_gradients(wrapped)
    return gradients(wrapped)


def _retained_against_immediate(ranks: int) -> list[tuple[float, str]]:
    # Different sizes, so that a buffer shared between forwards would be resized and overwritten.
    config = image_to_video()
    batches = [
        make_inputs(config, seed=1),
        make_inputs(config, seed=2),
        make_inputs(config, seed=3, grid=(2, 2, 4), batch=3, per_token=True),
    ]
    errors = []
    for recompute in ("none", "full"):
        wrapped = _wrapped(ranks, recompute)
        immediate = _gradients_of(wrapped, batches, retained=False)
        errors.append(worst(_gradients_of(wrapped, batches, retained=True), immediate))
    return errors


def test_retained_graphs_give_the_gradients_of_immediate_backwards(run_ranks):
    for errors in run_ranks(2, _retained_against_immediate, 2):
        for error, name in errors:
            assert error < TOLERANCE, name


def test_rollout_in_inference_mode_does_not_spoil_a_later_backward(single_process):
    wrapped = _wrapped(1, "none")
    inputs = make_inputs(image_to_video(), grid=(2, 1, 9))
    with torch.inference_mode():
        rollout = _forward(wrapped, inputs).clone()
    velocity = _forward(wrapped, inputs)
    velocity.backward(inputs.velocity_grad)
    assert relative_l2(velocity, rollout) == 0.0
