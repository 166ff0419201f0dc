# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""FLUX sharded over ranks against diffusers' own model: outputs and every gradient."""

from __future__ import annotations

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.flux.model import FluxTransformer
from megatron_leangrpo.models.flux.weight_map import (
    export_diffusers_gradients,
    load_diffusers_state_dict,
)
from tests.models.flux_parity import (
    TOLERANCE,
    Inputs,
    finalize_gradients,
    make_inputs,
    reference,
    relative_l2,
    small_config,
    worst,
    wrap_data_parallel,
)

# (3, 5) and 7 tokens leave pads in both streams at 2 and 4 ranks; (4, 4) and 8 leave none;
# (3, 4) and 6 leave text pads at 4 ranks only, and (1, 3) leaves a rank with pads alone.
SHAPES = {
    "odd": {"grid": (3, 5), "text_tokens": 7},
    "even": {"grid": (4, 4), "text_tokens": 8},
    "text odd": {"grid": (3, 4), "text_tokens": 6},
    "a rank of pads": {"grid": (1, 5), "text_tokens": 2},
}


@pytest.fixture(scope="module")
def references():
    config = small_config()
    return {name: reference(config, make_inputs(config, **shape)) for name, shape in SHAPES.items()}


# Tensor- and context-parallel size, sequence parallelism; 3 does not divide the 4 heads, and leaves
# pads in every shape.
Layout = tuple[int, int, bool]
LAYOUTS: list[list[Layout]] = [
    [(2, 1, False), (2, 1, True), (1, 2, False)],
    [(1, 3, False)],
    [(4, 1, True), (2, 2, True)],
]
REPEATED: list[Layout] = [(4, 1, False), (1, 4, False), (2, 2, False)]


def _of_layouts(layouts: list[Layout], weights: dict, batches: list[Inputs]) -> list:
    return [_velocity_and_gradients(layout, weights, batches) for layout in layouts]


def _velocity_and_gradients(
    layout: Layout, weights: dict, batches: list[Inputs]
) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    tensor_parallel, context_parallel, sequence_parallel = layout
    platform.initialize_distributed(tensor_parallel, context_parallel_size=context_parallel)
    config = small_config(
        tensor_model_parallel_size=tensor_parallel,
        context_parallel_size=context_parallel,
        sequence_parallel=sequence_parallel,
    )
    model = FluxTransformer(config)
    load_diffusers_state_dict(model, weights)
    wrapped = wrap_data_parallel(model)
    results = []
    for inputs in batches:
        wrapped.zero_grad_buffer()
        velocity = wrapped(inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)
        velocity.backward(inputs.velocity_grad)
        finalize_gradients(wrapped)
        gradients = export_diffusers_gradients(wrapped)
        results.append((velocity.detach(), gradients if platform.rank() == 0 else {}))
    return results


@pytest.mark.parametrize(
    "layouts", [*LAYOUTS, pytest.param(REPEATED, marks=pytest.mark.slow)], ids=str
)
def test_sharded_model_matches_diffusers(run_ranks, references, layouts):
    batches = [make_inputs(small_config(), **shape) for shape in SHAPES.values()]
    world = layouts[0][0] * layouts[0][1]
    ranks = run_ranks(world, _of_layouts, layouts, references["odd"]["weights"], batches)
    for layout, *of_ranks in zip(layouts, *ranks):
        for n, name in enumerate(SHAPES):
            velocity, gradients = of_ranks[0][n]
            assert relative_l2(velocity, references[name]["velocity"]) < TOLERANCE, (layout, name)
            error, tensor = worst(gradients, references[name]["gradients"])
            assert error < TOLERANCE, (layout, name, tensor)
            for rank in of_ranks[1:]:
                assert torch.equal(rank[n][0], velocity), "ranks disagree on the velocity"
