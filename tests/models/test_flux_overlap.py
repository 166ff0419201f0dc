# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""FLUX with overlapped collectives: diffusers' velocity and gradients, and the same training."""

from __future__ import annotations

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.flux.model import FluxTransformer
from megatron_leangrpo.models.flux.weight_map import (
    export_diffusers_gradients,
    load_diffusers_state_dict,
)
from megatron_leangrpo.overlap.settings import OverlapSettings
from tests.models.flux_parity import (
    TOLERANCE,
    finalize_gradients,
    make_inputs,
    reference,
    relative_l2,
    small_config,
    worst,
    wrap_data_parallel,
)

OVERLAPS = [
    OverlapSettings("bulk"),
    OverlapSettings("flash", "ring", 1),
    OverlapSettings("flash", "ring", 2),
    OverlapSettings("flash", "direct", 2),
]
# Pads in both streams, and a rank that has pads alone.
SHAPES = ({"grid": (3, 5), "text_tokens": 7}, {"grid": (1, 5), "text_tokens": 2})


def _model(ranks: int, sequence_parallel: bool, overlap: OverlapSettings, **settings):
    config = small_config(
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel,
        overlap=overlap,
        **settings,
    )
    return FluxTransformer(config)


def _velocities_and_gradients(ranks: int, weights: dict) -> dict:
    platform.initialize_distributed(ranks)
    results = {}
    # With selective recomputation flash splits the queries of attention.
    cases = [(overlap, True, "none") for overlap in OVERLAPS]
    cases += [(overlap, True, "selective") for overlap in OVERLAPS[2:]]
    cases += [(OVERLAPS[2], True, "full"), (OVERLAPS[0], False, "none")]
    cases += [(OVERLAPS[2], False, "selective")]
    for overlap, sequence_parallel, recompute in cases:
        # Two ranks run everything; four add only what more ranks can break.
        if ranks > 2 and (overlap not in OVERLAPS[2:] or recompute == "full"):
            continue
        model = _model(ranks, sequence_parallel, overlap, recompute_granularity=recompute)
        load_diffusers_state_dict(model, weights)
        wrapped = wrap_data_parallel(model)
        for n, shape in enumerate(SHAPES if recompute == "none" else SHAPES[:1]):
            inputs = make_inputs(small_config(), **shape)
            wrapped.zero_grad_buffer()
            velocity = wrapped(inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)
            velocity.backward(inputs.velocity_grad)
            finalize_gradients(wrapped)
            gradients = export_diffusers_gradients(wrapped)
            key = (overlap, sequence_parallel, recompute, n)
            results[key] = velocity.detach(), gradients if platform.rank() == 0 else {}
    return results


def _on_ranks(ranks: int, weights: dict) -> tuple[dict, list[float]]:
    results = _velocities_and_gradients(ranks, weights)
    return results, _frozen(weights) if ranks == 2 else []


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_overlapped_model_matches_diffusers(run_ranks, ranks):
    config = small_config()
    references = [reference(config, make_inputs(config, **shape)) for shape in SHAPES]
    results = run_ranks(ranks, _on_ranks, ranks, references[0]["weights"])
    of_ranks, frozen = zip(*results)
    # Frozen weights pass the same gradient on.
    assert all(difference < TOLERANCE for differences in frozen for difference in differences)
    for key, (velocity, gradients) in of_ranks[0].items():
        expected = references[key[-1]]
        assert relative_l2(velocity, expected["velocity"]) < TOLERANCE, key
        error, tensor = worst(gradients, expected["gradients"])
        assert error < TOLERANCE, (key, tensor)
        for other in of_ranks[1:]:
            assert torch.equal(other[key][0], velocity), "ranks disagree on the velocity"


def _frozen(weights: dict) -> list[float]:
    """What a frozen model's input gradient differs by from megatron's own collectives."""
    inputs = make_inputs(small_config())
    gradients = []
    for overlap in (OverlapSettings(), OVERLAPS[0], *OVERLAPS[2:]):
        model = _model(2, True, overlap).requires_grad_(False)
        load_diffusers_state_dict(model, weights)
        latents = inputs.latents.clone().requires_grad_()
        velocity = model(latents, inputs.timestep, inputs.prompt, inputs.grid)
        velocity.backward(inputs.velocity_grad)
        gradients.append(latents.grad)
    return [relative_l2(gradient, gradients[0]) for gradient in gradients[1:]]


def _train(weights: dict) -> list[dict[str, torch.Tensor]]:
    """Eight steps of plain gradient descent with each overlap."""
    platform.initialize_distributed(2)
    trained = []
    for overlap in (OverlapSettings(), OVERLAPS[0], OVERLAPS[2]):
        model = _model(2, True, overlap)
        load_diffusers_state_dict(model, weights)
        wrapped = wrap_data_parallel(model)
        for step in range(8):
            inputs = make_inputs(small_config(), seed=step)
            wrapped.zero_grad_buffer()
            velocity = wrapped(inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)
            (velocity - inputs.velocity_grad).square().mean().backward()
            finalize_gradients(wrapped)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.main_grad, alpha=0.05)
        trained.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return trained


@pytest.mark.slow
def test_training_steps_end_at_the_same_weights(run_ranks):
    config = small_config()
    weights = reference(config, make_inputs(config))["weights"]
    for off, *others in run_ranks(2, _train, weights):
        for trained in others:
            # Other orders of float32 sums, over eight steps.
            assert max(relative_l2(trained[name], off[name]) for name in off) < 1e-5
