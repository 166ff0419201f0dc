# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Weights between diffusers' names and sharded parameters."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.flux.model import FluxTransformer
from megatron_leangrpo.models.flux.weight_map import (
    export_diffusers_state_dict,
    initialise,
    load_diffusers_state_dict,
    weight_rules,
)
from tests.models.flux_parity import diffusers_model, small_config


def _model(tensor_parallel: int) -> FluxTransformer:
    platform.initialize_distributed(tensor_parallel)
    return FluxTransformer(small_config(tensor_model_parallel_size=tensor_parallel))


def _same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[name], expected[name]) for name in expected
    )


def test_every_name_is_used_exactly_once_on_both_sides():
    config = small_config()
    rules = weight_rules(config)
    theirs = Counter(name for rule in rules for name in rule.theirs)
    ours = Counter(name for rule in rules for name in rule.ours)
    assert set(theirs.values()) == set(ours.values()) == {1}
    assert theirs.keys() == diffusers_model(config).state_dict().keys()
    assert ours.keys() == dict(FluxTransformer(config).named_parameters()).keys()


def _round_trip(tensor_parallel: int, weights: dict) -> dict:
    model = _model(tensor_parallel)
    load_diffusers_state_dict(model, weights)
    return export_diffusers_state_dict(model)


@pytest.mark.parametrize("tensor_parallel", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_round_trip_is_bitwise_on_every_rank(run_ranks, tensor_parallel):
    weights = {name: t.clone() for name, t in diffusers_model(small_config()).state_dict().items()}
    for exported in run_ranks(tensor_parallel, _round_trip, tensor_parallel, weights):
        assert _same(exported, weights)


def _initialised(tensor_parallel: int, seed: int) -> dict:
    model = _model(tensor_parallel)
    initialise(model, seed)
    return export_diffusers_state_dict(model)


def test_random_weights_depend_on_the_seed_and_not_on_the_layout(run_ranks):
    alone = run_ranks(1, _initialised, 1, 7)[0]
    assert all(_same(other, alone) for other in run_ranks(2, _initialised, 2, 7))
    assert not _same(run_ranks(1, _initialised, 1, 8)[0], alone)
    weight = alone["transformer_blocks.0.ff.net.2.weight"]
    assert weight.abs().max() <= 384**-0.5 and weight.std() > 0.5 * 384**-0.5
    assert alone["transformer_blocks.0.attn.norm_q.weight"].eq(1).all()
