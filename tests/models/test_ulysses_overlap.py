# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Models that overlap the exchange around attention: the bits of the plain one, and diffusers."""

from __future__ import annotations

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.common.weights import initialise
from megatron_leangrpo.models.flux.model import FluxTransformer
from megatron_leangrpo.models.flux.weight_map import (
    export_diffusers_gradients,
    load_diffusers_state_dict,
)
from megatron_leangrpo.models.flux.weight_map import weight_rules as flux_rules
from megatron_leangrpo.models.wan.model import WanTransformer
from megatron_leangrpo.models.wan.weight_map import weight_rules as wan_rules
from megatron_leangrpo.overlap.settings import OverlapSettings
from tests.models import flux_parity, wan_parity
from tests.models.flux_parity import finalize_gradients, relative_l2, worst, wrap_data_parallel

FLASH = OverlapSettings("flash", sub_slices=2)
FAMILIES = {
    "flux": (flux_parity, flux_parity.small_config, FluxTransformer),
    "wan": (wan_parity, wan_parity.text_to_video, WanTransformer),
}


def _run(model: torch.nn.Module, inputs) -> tuple[torch.Tensor, torch.nn.Module]:
    wrapped = wrap_data_parallel(model)
    velocity = wrapped(inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)
    velocity.backward(inputs.velocity_grad)
    finalize_gradients(wrapped)
    return velocity.detach(), wrapped


def _changed_in_all(ranks: int) -> list[str]:
    platform.initialize_distributed(1, context_parallel_size=ranks)
    return [name for family in FAMILIES for name in _changed(family, ranks)]


def _changed(family: str, ranks: int) -> list[str]:
    """Tensors that are not those of the plain exchange, bit for bit."""
    parity, make_config, build = FAMILIES[family]
    rules = {"flux": flux_rules, "wan": wan_rules}[family]
    changed = []
    for recompute in ("none", "selective", "full"):
        results = []
        for overlap in (OverlapSettings(), FLASH):
            config = make_config(
                context_parallel_size=ranks, recompute_granularity=recompute, overlap=overlap
            )
            model = build(config)
            initialise(model, rules(config), seed=5)
            velocity, _ = _run(model, parity.make_inputs(config))
            gradients = {name: p.main_grad.clone() for name, p in model.named_parameters()}
            results.append({"velocity": velocity, **gradients})
        plain, cut = results
        changed += [
            f"{family} {n}, {recompute}" for n in plain if not torch.equal(plain[n], cut[n])
        ]
    return changed


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_overlapping_changes_no_bit_of_velocity_and_gradients(run_ranks, ranks):
    """Two ranks have two heads each; three have pads among them, in tokens too."""
    assert run_ranks(ranks, _changed_in_all, ranks) == [[] for _ in range(ranks)]


def _eight_heads(family: str, **settings):
    """So that each of four ranks has two groups of them."""
    _, make_config, _ = FAMILIES[family]
    wide = {"hidden_size": 2 * make_config().hidden_size, "num_attention_heads": 8}
    return make_config(**wide, **settings)


def _with_tensor_parallel(weights: dict[str, dict]) -> dict[str, tuple[torch.Tensor, dict]]:
    platform.initialize_distributed(2, context_parallel_size=2)
    return {family: _sharded_twice(family, weights[family]) for family in FAMILIES}


def _sharded_twice(family: str, weights: dict) -> tuple[torch.Tensor, dict]:
    layout = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    config = _eight_heads(family, **layout, sequence_parallel=True, overlap=FLASH)
    parity, _, build = FAMILIES[family]
    model = build(config)
    {"flux": load_diffusers_state_dict, "wan": wan_parity.load}[family](model, weights)
    velocity, wrapped = _run(model, parity.make_inputs(config))
    gradients = {"flux": export_diffusers_gradients, "wan": wan_parity.gradients}[family]
    return velocity, gradients(wrapped)


def test_with_overlapped_linears_beside_it_the_model_is_diffusers(run_ranks):
    references = {}
    for family, (parity, *_) in FAMILIES.items():
        config = _eight_heads(family)
        references[family] = parity.reference(config, parity.make_inputs(config))
    weights = {family: expected["weights"] for family, expected in references.items()}
    for family, (velocity, found) in run_ranks(4, _with_tensor_parallel, weights)[0].items():
        expected = references[family]
        if family == "wan":
            grid = wan_parity.make_inputs(_eight_heads(family)).grid
            velocity = wan_parity.unpack(velocity, grid)
        tolerance = FAMILIES[family][0].TOLERANCE
        assert relative_l2(velocity, expected["velocity"]) < tolerance, family
        error, tensor = worst(found, expected["gradients"])
        assert error < tolerance, (family, tensor)
