# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters against PEFT on diffusers' models, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.common.lora import (
    adaptable,
    adapter_rules,
    adapters_off,
    attach_adapters,
    initialise_adapters,
    merged,
)
from megatron_leangrpo.models.common.lora_targets import LowRank, match_targets
from megatron_leangrpo.models.common.weights import full_tensors, initialise
from megatron_leangrpo.overlap.settings import OverlapSettings
from tests.models import lora_parity
from tests.models.flux_parity import (
    TOLERANCE,
    finalize_gradients,
    relative_l2,
    worst,
    wrap_data_parallel,
)
from tests.models.lora_parity import (
    Reference,
    adapter_gradients,
    as_diffusers,
    velocity_of,
    with_adapters,
)

MODELS = ("flux", "wan")
FLASH = {"overlap": OverlapSettings("flash"), "recompute_granularity": "selective"}
BULK = {"overlap": OverlapSettings("bulk"), "recompute_granularity": "full"}
SHARDED = {"sequence_parallel": True}
Layout = tuple[int, int, dict[str, Any]]
# Tensor- and context-parallel size, and other fields of the configuration.
LAYOUTS: dict[str, list[Layout]] = {
    "alone": [(1, 1, {})],
    "tp 2; flash, queries split; cp 2": [
        (2, 1, SHARDED),
        (2, 1, {**SHARDED, **FLASH}),
        (1, 2, {}),
    ],
}
REPEATED: dict[str, list[Layout]] = {
    "tp 2, whole tokens; bulk, recomputed": [(2, 1, {}), (2, 1, {**SHARDED, **BULK})],
    "tp 4; tp 2 cp 2": [(4, 1, SHARDED), (2, 2, SHARDED)],
}


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    platform.initialize_distributed(tensor_model_parallel_size=1)
    made = {name: lora_parity.peft_reference(name) for name in MODELS}
    platform.destroy_distributed()
    return made


def _of_layouts(references: dict[str, Reference], layouts: list[Layout]) -> list[dict]:
    return [_results(references, *layout) for layout in layouts]


def _results(references: dict[str, Reference], tp: int, cp: int, overrides: dict) -> dict:
    platform.initialize_distributed(tp, context_parallel_size=cp)
    sizes = {"tensor_model_parallel_size": tp, "context_parallel_size": cp}
    results = {}
    for name, reference in references.items():
        model = with_adapters(name, reference, **sizes, **overrides)
        wrapped = wrap_data_parallel(model)
        buffers = sum(buffer.grad_data.numel() for buffer in wrapped.buffers)
        inputs = reference.inputs
        velocity = velocity_of(name, wrapped, inputs)
        velocity.backward(inputs.velocity_grad)
        finalize_gradients(wrapped)
        weights = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            with merged(model):
                as_merged = velocity_of(name, model, inputs)
            again = velocity_of(name, model, inputs)
        results[name] = {
            "velocity": as_diffusers(name, velocity.detach(), inputs),
            "gradients": adapter_gradients(model),
            "merged": relative_l2(as_merged, again),
            "restored": all(map(torch.equal, weights, model.parameters())),
            "buffers": buffers,
            "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        }
    return results


@pytest.mark.parametrize(
    "layouts", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in REPEATED)]
)
def test_adapters_give_pefts_velocity_and_gradients(run_ranks, references, layouts):
    chosen = (LAYOUTS | REPEATED)[layouts]
    ranks = run_ranks(chosen[0][0] * chosen[0][1], _of_layouts, references, chosen)
    for result_of in (results for rank in ranks for results in rank):
        for name, result in result_of.items():
            reference = references[name]
            assert relative_l2(result["velocity"], reference.velocity) < TOLERANCE, name
            error, tensor = worst(result["gradients"], reference.gradients)
            assert error < TOLERANCE, (name, tensor)
            # Rounding of W + B A in float32, over a few blocks.
            assert result["merged"] < 1e-6, name
            assert result["restored"], name
            # megatron pads a buffer to a multiple of a few hundred numbers at most.
            assert result["trained"] <= result["buffers"] < result["trained"] + 1024, name


def _fresh(tp: int) -> dict[str, torch.Tensor]:
    platform.initialize_distributed(tp)
    family, config, model = lora_parity.build("flux", tensor_model_parallel_size=tp)
    rules = family.weight_rules(config)
    # Fused projections may have adapters of several ranks, or none.
    ranks = {"attn.to_q": LowRank(2, 2.0), "attn.to_v": LowRank(5, 1.0), "proj_mlp": LowRank(1, 1)}
    known = adaptable(model, rules)
    chosen = {n: low for end, low in ranks.items() for n in match_targets([end], known)}
    attach_adapters(model, rules, chosen)
    initialise_adapters(model, seed=1)
    return full_tensors(model, adapter_rules(model))


def test_fresh_adapters_are_the_same_numbers_in_every_layout(run_ranks):
    alone, sharded = run_ranks(1, _fresh, 1)[0], run_ranks(2, _fresh, 2)[0]
    assert alone.keys() == sharded.keys()
    assert all(torch.equal(alone[name], sharded[name]) for name in alone)
    assert {tuple(t.shape) for n, t in alone.items() if "to_v.lora_B" in n} == {(96, 5)}


def test_a_fresh_adapter_changes_no_bit_and_a_trained_one_is_switched_off(single_process):
    family, config, model = lora_parity.build("flux")
    rules = family.weight_rules(config)
    initialise(model, rules, seed=0)
    inputs = lora_parity.flux_parity.make_inputs(config)
    with torch.no_grad():
        base = velocity_of("flux", model, inputs)
        names = match_targets(["to_q", "proj_out"], adaptable(model, rules))
        attach_adapters(model, rules, {n: LowRank(2, 4.0) for n in names})
        initialise_adapters(model, seed=0)
        assert torch.equal(velocity_of("flux", model, inputs), base)
        for parameter in model.parameters():
            parameter.add_(0.1 * parameter.requires_grad)
        assert not torch.allclose(velocity_of("flux", model, inputs), base)
        with adapters_off(model):
            assert torch.equal(velocity_of("flux", model, inputs), base)
        assert not torch.allclose(velocity_of("flux", model, inputs), base)


def test_a_target_that_matches_nothing_is_refused_with_what_there_is(single_process):
    family, config, model = lora_parity.build("wan")
    known = adaptable(model, family.weight_rules(config))
    assert len(match_targets(["to_out.0"], known)) == 2 * config.num_layers
    assert match_targets(["blocks.0.attn1.to_q"], known) == ["blocks.0.attn1.to_q"]
    # "o_q" is the end of a name, but not after a dot.
    for target in ("o_q", "to_qkv", "x_embedder"):
        with pytest.raises(ValueError, match=f"lora.targets = '{target}'.*attn2.add_k_proj"):
            match_targets(["to_q", target], known)
