# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Runs that train low-rank adapters: one gradient everywhere, and a base that stays."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.grpo.config_checks import check_bounds
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.grpo.reference import WithoutAdapters
from megatron_leangrpo.models.common.lora import adapter_rules
from megatron_leangrpo.models.common.weights import full_shapes, full_tensors, load_full_tensors
from tests.grpo import tiny

LORA = {"rank": 2, "alpha": 3.0}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    return tiny.write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(autouse=True)
def _leave_the_world():
    yield
    platform.destroy_distributed()


def _config(prompts: str, **sections: Any) -> Any:
    defaults = {"lora": LORA, "grpo": {"group_size": 2, "micro_batch_size": 1}}
    merged = {
        name: {**defaults.get(name, {}), **sections.get(name, {})}
        for name in defaults.keys() | sections.keys()
    }
    return tiny.tiny_config(prompts, **merged)


def _trained(experiment: Experiment) -> Experiment:
    """With B away from zero, where A's gradient would be zero, and the KL term's, too."""
    model = experiment.policy.model
    generator = torch.Generator().manual_seed(0)
    rules = adapter_rules(model)
    shapes = full_shapes(model, rules)
    numbers = {n: 0.3 * torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    load_full_tensors(model, rules, numbers)
    return experiment


def _gradient(experiment: Experiment, schedule: str) -> dict[str, torch.Tensor]:
    experiment.runner(schedule).run(0, experiment.sampler.batch(0))
    return experiment.architecture.export_gradients(experiment.model)


def _gradients(prompts: str, schedules: tuple[str, ...], **sections: Any) -> list[Any]:
    experiment = _trained(tiny.start(_config(prompts, **sections)))
    return [_gradient(experiment, schedule) for schedule in schedules]


CASES = {
    "plain": {},
    "a KL term": {"grpo": {"kl_beta": 0.5, "kl_form": "velocity_mse"}},
    "blocks recomputed": {"model": {"recompute_granularity": "full"}},
    "an FP8 base, a KL term": {
        "fp8": {"recipe": "current", "backend": "reference"},
        "grpo": {"kl_beta": 0.5, "kl_form": "velocity_mse"},
    },
    "videos by two experts, guided, a KL term": tiny.merged(
        tiny.WAN,
        {
            "model": {"preset": "wan_smallest_experts"},
            "sampling": {"num_steps": 4, "cfg_scale": 4.0},
            "grpo": {"kl_beta": 0.5, "kl_form": "exact"},
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_retain_and_reweight_give_the_gradient_of_replay(prompts, case):
    schedules = ("replay", "retain", "reweight")
    replay, retain, reweight = _gradients(prompts, schedules, **CASES[case])
    assert len(replay) > 20
    assert all(gradient.any() for gradient in replay.values())
    assert tiny.worst(retain, replay)[0] == 0.0
    # In float32 a moment and its shift round where replay has one product.
    whole = [torch.cat([g[n].flatten() for n in replay]) for g in (reweight, replay)]
    assert tiny.relative_l2(*whole) < 1e-6


def _sharded(prompts: str, tp: int, early: bool = False) -> tuple[dict[str, torch.Tensor], float]:
    """The first gradient, and the norm that an update has clipped it by."""
    config = _config(
        prompts,
        parallel={"tensor_model_parallel_size": tp},
        grpo={"kl_beta": 0.5, "kl_form": "velocity_mse"},
        optimizer={"overlap_grad_reduce": early},
    )
    experiment = _trained(tiny.start(config))
    gradient = _gradient(experiment, "retain")
    return gradient, tiny.train(experiment, iterations=1)[0][0]["grad_norm"]


@pytest.mark.parametrize(("tp", "early"), [(1, False), (1, True), (2, False)])
def test_two_ranks_give_the_gradient_of_one(run_ranks, prompts, tp, early):
    [(alone, norm)] = run_ranks(1, _sharded, prompts, 1)
    whole = torch.cat([g.flatten() for g in alone.values()]).norm().item()
    assert norm == pytest.approx(whole, rel=1e-5)
    for sharded, own_norm in run_ranks(2, _sharded, prompts, tp, early):
        # Sums over ranks and products of other shapes round in another order.
        assert tiny.worst(sharded, alone)[0] < 1e-5
        assert own_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_moves_the_adapters_and_no_bit_of_the_base(prompts, dtype):
    experiment = tiny.start(_config(prompts, model={"dtype": dtype}, grpo={"kl_beta": 0.1}))
    model = experiment.policy.model
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    updates = tiny.train(experiment, iterations=2)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    adapters = {n for n, p in model.named_parameters() if p.requires_grad}
    assert moved == adapters
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    # Fresh adapters are the base: no KL before the first update, some after it.
    first, second = updates[0][0], updates[1][0]
    assert first["kl"] == 0.0
    assert second["kl"] > 0
    assert isinstance(experiment.reference.model, WithoutAdapters)


def test_gradients_and_their_copies_are_as_large_as_the_adapters(prompts):
    experiment = tiny.start(_config(prompts))
    count = experiment.architecture.adaptation.num_parameters
    assert count == sum(p.numel() for p in experiment.policy.model.parameters() if p.requires_grad)
    buffers = experiment.runner("reweight").schedule.buffers
    # megatron pads a buffer by a few hundred numbers at most.
    assert 4 * count <= buffers.num_bytes < 4 * (count + 1024)


def test_a_run_starts_from_a_lora_file(prompts, tmp_path):
    from megatron_leangrpo.models.saving import save_lora_folder

    first = _trained(tiny.start(_config(prompts)))
    model, adaptation = first.policy.model, first.architecture.adaptation
    numbers = full_tensors(model, adapter_rules(model))
    save_lora_folder(tmp_path / "lora", adaptation.projections, numbers)
    path = {"rank": 0, "alpha": None, "path": str(tmp_path / "lora")}
    second = tiny.start(_config(prompts, lora=path))
    assert second.architecture.adaptation.projections == adaptation.projections
    again = full_tensors(second.policy.model, adapter_rules(second.policy.model))
    assert all(torch.equal(again[name], numbers[name]) for name in numbers)


REFUSED = {
    "rank 0 with targets": ({"rank": 0, "alpha": None, "targets": ["to_q"]}, "lora.rank = 0"),
    "a path and a rank": ({"path": "x"}, "beside lora.path"),
    "an unknown target": ({"targets": ["to_q", "attn.qkv"]}, "lora.targets = 'attn.qkv'"),
    "alpha 0": ({"alpha": 0.0}, "lora.alpha = 0.0 must be above 0"),
    "no such file": ({"rank": 0, "alpha": None, "path": "none"}, "lora.path: none does not exist"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_be_are_refused(prompts, case):
    lora, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        _checked_start(_config(prompts, lora=lora))


def _checked_start(config: Any) -> None:
    check_bounds(config)
    tiny.start(config)


def test_a_reference_without_a_copy_cannot_be_offloaded(prompts):
    config = _config(prompts, grpo={"reference_offload": True})
    with pytest.raises(ValueError, match="no second copy"):
        check_bounds(config)
    check_bounds(dataclasses.replace(config, lora=type(config.lora)()))
