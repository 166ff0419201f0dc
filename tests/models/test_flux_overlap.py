# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""FLUX with overlapped collectives: diffusers' velocity and gradients, and the same training."""

from __future__ import annotations

import itertools

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
    cases = itertools.product(OVERLAPS, (True, False), ("none", "selective", "full"))
    for overlap, sequence_parallel, recompute in cases:
        if recompute == "full" and (ranks > 2 or overlap != OVERLAPS[2]):
            continue
        # With selective recomputation flash splits the queries of attention.
        if recompute == "selective" and overlap not in OVERLAPS[2:]:
            continue
        # Two ranks run everything; four add only what more ranks can break.
        if ranks > 2 and overlap not in OVERLAPS[2:]:
            continue
        model = _model(ranks, sequence_parallel, overlap, recompute_granularity=recompute)
        load_diffusers_state_dict(model, weights)
        wrapped = wrap_data_parallel(model)
        for n, shape in enumerate(SHAPES):
            inputs = make_inputs(small_config(), **shape)
            wrapped.zero_grad_buffer()
            velocity = wrapped(inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)
            velocity.backward(inputs.velocity_grad)
            finalize_gradients(wrapped)
            gradients = export_diffusers_gradients(wrapped)
            key = (overlap, sequence_parallel, recompute, n)
            results[key] = velocity.detach(), gradients if platform.rank() == 0 else {}
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_overlapped_model_matches_diffusers(run_ranks, ranks):
    config = small_config()
    references = [reference(config, make_inputs(config, **shape)) for shape in SHAPES]
    of_ranks = run_ranks(ranks, _velocities_and_gradients, ranks, references[0]["weights"])
    for key, (velocity, gradients) in of_ranks[0].items():
        expected = references[key[-1]]
        assert relative_l2(velocity, expected["velocity"]) < TOLERANCE, key
        error, tensor = worst(gradients, expected["gradients"])
        assert error < TOLERANCE, (key, tensor)
        for other in of_ranks[1:]:
            assert torch.equal(other[key][0], velocity), "ranks disagree on the velocity"


def _frozen(weights: dict) -> list[float]:
    """What a frozen model's input gradient differs by from megatron's own collectives."""
    platform.initialize_distributed(2)
    inputs = make_inputs(small_config())
    gradients = []
    for overlap in (OverlapSettings(), *OVERLAPS):
        model = _model(2, True, overlap).requires_grad_(False)
        load_diffusers_state_dict(model, weights)
        latents = inputs.latents.clone().requires_grad_()
        velocity = model(latents, inputs.timestep, inputs.prompt, inputs.grid)
        velocity.backward(inputs.velocity_grad)
        gradients.append(latents.grad)
    return [relative_l2(gradient, gradients[0]) for gradient in gradients[1:]]


def test_frozen_weights_pass_the_same_gradient_on(run_ranks):
    config = small_config()
    weights = reference(config, make_inputs(config))["weights"]
    for differences in run_ranks(2, _frozen, weights):
        assert max(differences) < TOLERANCE


def _train(weights: dict) -> list[dict[str, torch.Tensor]]:
    """Twenty steps of plain gradient descent with each overlap."""
    platform.initialize_distributed(2)
    trained = []
    for overlap in (OverlapSettings(), OVERLAPS[0], OVERLAPS[2]):
        model = _model(2, True, overlap)
        load_diffusers_state_dict(model, weights)
        wrapped = wrap_data_parallel(model)
        for step in range(20):
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


def test_twenty_training_steps_end_at_the_same_weights(run_ranks):
    config = small_config()
    weights = reference(config, make_inputs(config))["weights"]
    for off, *others in run_ranks(2, _train, weights):
        for trained in others:
            # Other orders of float32 sums, over twenty steps.
            assert max(relative_l2(trained[name], off[name]) for name in off) < 1e-5
