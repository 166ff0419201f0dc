# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Wan sharded over ranks against diffusers' own model and against one rank."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.common import transformer
from megatron_leangrpo.models.common.weights import initialise
from megatron_leangrpo.models.wan.config import WanConfig
from megatron_leangrpo.models.wan.model import WanTransformer
from megatron_leangrpo.models.wan.weight_map import weight_rules
from megatron_leangrpo.overlap.settings import OverlapSettings
from megatron_leangrpo.parallel import tokens
from tests.models.flux_parity import finalize_gradients, relative_l2, worst, wrap_data_parallel
from tests.models.wan_parity import (
    TOLERANCE,
    Inputs,
    gradients,
    image_to_video,
    load,
    make_inputs,
    reference,
    text_to_video,
    unpack,
)

# 45 tokens leave pads at 2 and 4 ranks, 16 leave none, and 5 leave a rank with pads alone.
CASES = {
    "odd": (text_to_video, {"grid": (3, 3, 5)}),
    "even": (text_to_video, {"grid": (2, 2, 4)}),
    "a rank of pads": (text_to_video, {"grid": (1, 1, 5)}),
    "picture": (image_to_video, {"grid": (1, 3, 5)}),
    "timesteps per token": (text_to_video, {"grid": (3, 3, 5), "per_token": True}),
}
# Tensor- and context-parallel size, sequence parallelism; 3 does not divide the 4 heads, and leaves
# pads in every shape.
Layout = tuple[int, int, bool]
LAYOUTS: list[list[Layout]] = [
    [(2, 1, True), (1, 2, False)],
    [(1, 3, False)],
    [(4, 1, True), (2, 2, True)],
]
REPEATED: list[list[Layout]] = [[(2, 1, False)], [(4, 1, False), (2, 2, False)]]

Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def _run(model: torch.nn.Module, inputs: Inputs) -> Result:
    """Velocity, and full gradients under diffusers' names."""
    wrapped = wrap_data_parallel(model)
    wrapped.zero_grad_buffer()
    velocity = wrapped(inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)
    velocity.backward(inputs.velocity_grad)
    finalize_gradients(wrapped)
    return velocity.detach(), gradients(wrapped)


def _on_first(results: list[Result]) -> list[Result]:
    return [(v, g if platform.rank() == 0 else {}) for v, g in results]


def _sharded(config: WanConfig, ranks: int, sequence_parallel: bool) -> WanConfig:
    return replace(config, tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel)


def _of_layouts(layouts: list[Layout], weights: list[dict]) -> list[list[Result]]:
    return [_float32(layout, weights) for layout in layouts]


def _float32(layout: Layout, weights: list[dict]) -> list[Result]:
    tensor_parallel, context_parallel, sequence_parallel = layout
    platform.initialize_distributed(tensor_parallel, context_parallel_size=context_parallel)
    results = []
    for (make_config, options), tensors in zip(CASES.values(), weights):
        config = make_config(context_parallel_size=context_parallel)
        model = WanTransformer(_sharded(config, tensor_parallel, sequence_parallel))
        load(model, tensors)
        results.append(_run(model, make_inputs(make_config(), **options)))
    return _on_first(results)


@pytest.fixture(scope="module")
def references():
    return {
        name: reference(make_config(), make_inputs(make_config(), **options))
        for name, (make_config, options) in CASES.items()
    }


@pytest.mark.parametrize(
    "layouts", [*LAYOUTS, *(pytest.param(of, marks=pytest.mark.slow) for of in REPEATED)], ids=str
)
def test_sharded_model_matches_diffusers(run_ranks, references, layouts):
    weights = [references[name]["weights"] for name in CASES]
    ranks = run_ranks(layouts[0][0] * layouts[0][1], _of_layouts, layouts, weights)
    for layout, *of_ranks in zip(layouts, *ranks):
        for n, name in enumerate(CASES):
            expected, grid = references[name], CASES[name][1]["grid"]
            velocity, found = of_ranks[0][n]
            error = relative_l2(unpack(velocity, grid), expected["velocity"])
            assert error < TOLERANCE, (layout, name)
            error, tensor = worst(found, expected["gradients"])
            assert error < TOLERANCE, (layout, name, tensor)
            for rank in of_ranks[1:]:
                assert torch.equal(rank[n][0], velocity), "ranks disagree on the velocity"


RECOMPUTED = ("none", "selective", "full")


def _overlapped(ranks: int, weights: dict) -> dict[tuple, Result]:
    platform.initialize_distributed(ranks)
    results = {}
    flash = OverlapSettings("flash", "ring", 2)
    cases = [(OverlapSettings("bulk"), "none"), *((flash, how) for how in RECOMPUTED)]
    for overlap, recompute in cases:
        config = image_to_video(overlap=overlap, recompute_granularity=recompute)
        model = WanTransformer(_sharded(config, ranks, True))
        load(model, weights)
        inputs = make_inputs(config, **CASES["picture"][1])
        results[overlap.mode, recompute] = _on_first([_run(model, inputs)])[0]
    return results


def test_overlapped_collectives_match_diffusers(run_ranks, references):
    expected, grid = references["picture"], CASES["picture"][1]["grid"]
    for mode, (velocity, found) in run_ranks(2, _overlapped, 2, expected["weights"])[0].items():
        assert relative_l2(unpack(velocity, grid), expected["velocity"]) < TOLERANCE, mode
        error, tensor = worst(found, expected["gradients"])
        assert error < TOLERANCE, (mode, tensor)


def _float64(ranks: int, sequence_parallel: bool) -> list[Result]:
    platform.initialize_distributed(ranks)
    results = []
    for make_config, options in CASES.values():
        config = _sharded(make_config(params_dtype=torch.float64), ranks, sequence_parallel)
        model = WanTransformer(config)
        initialise(model, weight_rules(config), seed=5)
        results.append(_run(model, make_inputs(config, **options).to(torch.float64)))
    return _on_first(results)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_float64_matches_one_rank_to_rounding(run_ranks, ranks):
    alone = run_ranks(1, _float64, 1, False)[0]
    sharded = run_ranks(ranks, _float64, ranks, True)[0]
    for name, (velocity, found), (wanted, expected) in zip(CASES, sharded, alone):
        assert velocity.dtype == torch.float64
        assert relative_l2(velocity, wanted) < 1e-12, name
        error, tensor = worst(found, expected)
        assert error < 1e-12, (name, tensor)


def _large_pads(x: torch.Tensor, length: int) -> torch.Tensor:
    pads = torch.linspace(-1e6, 1e6, x[0].numel()).to(x.dtype).view_as(x[0])
    return torch.cat((x, pads.expand(length - x.shape[0], *pads.shape)))


def _pads_that_matter(tensor_parallel: int, context_parallel: int) -> list[str]:
    """Names of the cases and tensors that change with what is in pad rows."""
    platform.initialize_distributed(tensor_parallel, context_parallel_size=context_parallel)
    changed = []
    for name, (make_config, options) in CASES.items():
        config = make_config(context_parallel_size=context_parallel)
        config = _sharded(config, tensor_parallel, True)
        model = WanTransformer(config)
        initialise(model, weight_rules(config), seed=5)
        inputs = make_inputs(config, **options)
        velocity, expected = _run(model, inputs)
        with (
            mock.patch.object(transformer, "pad_tokens", _large_pads),
            mock.patch.object(tokens, "pad_tokens", _large_pads),
        ):
            other, found = _run(model, inputs)
        changed += [] if torch.equal(other, velocity) else [name]
        changed += [f"{name}: {n}" for n in expected if not torch.equal(found[n], expected[n])]
    return changed


@pytest.mark.parametrize(("tensor_parallel", "context_parallel"), [(2, 1), (1, 3)])
def test_large_numbers_in_pad_rows_change_no_bit(run_ranks, tensor_parallel, context_parallel):
    layout = tensor_parallel, context_parallel
    for changed in run_ranks(tensor_parallel * context_parallel, _pads_that_matter, *layout):
        assert changed == []
