# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A transformer cut into pipeline stages has the gradients of the whole one, on every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_leangrpo.models.flux.config import PRESETS
from megatron_leangrpo.models.wan.config import PRESETS as WAN_PRESETS
from tests.grpo import tiny

PRESETS["flux_of_four"] = lambda **o: tiny.flux_smallest(
    **{"num_double_blocks": 2, "num_single_blocks": 2, **o}
)
WAN_PRESETS["wan_of_four"] = lambda **o: tiny.wan_smallest(**{"num_layers": 4, **o})
WAN_PRESETS["wan_experts_of_four"] = lambda **o: tiny.wan_smallest_experts(
    **{"num_layers": 4, **o}
)
SCHEDULES = ("replay", "retain", "reweight", "jagg")

FLUX: dict[str, dict[str, Any]] = {"model": {"preset": "flux_of_four"}}
VIDEO = tiny.merged(tiny.WAN, {"model": {"preset": "wan_of_four"}})
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "flux": FLUX,
    "flux, KL, clipped advantages": tiny.merged(
        FLUX, {"grpo": {"kl_beta": 0.5, "kl_form": "velocity_mse", "adv_clip": 0.5}}
    ),
    "flux, LoRA, KL": tiny.merged(FLUX, {"lora": {"rank": 2}, "grpo": {"kl_beta": 0.5}}),
    "videos by two experts, guided in two forwards, KL": tiny.merged(
        tiny.WAN,
        {
            "model": {"preset": "wan_experts_of_four"},
            "sampling": {"cfg_scale": 4.0, "cfg_forwards": "separate"},
            "grpo": {"kl_beta": 0.5, "kl_form": "exact"},
        },
    ),
    "videos, guided in one batch": tiny.merged(VIDEO, {"sampling": {"cfg_scale": 4.0}}),
    "a window for each sample, std of all groups": tiny.merged(
        FLUX,
        {
            "sampling": {"step_selection": "random_fraction", "timestep_fraction": 0.7},
            "grpo": {"advantage": "flow_grpo_global_std"},
        },
    ),
}


def gradients(prompts: str, case: str, schedules: tuple[str, ...], **parallel: Any) -> list:
    """This rank's gradients and metrics of the first iteration under each schedule."""
    sections = tiny.merged(
        {"model": {"dtype": "float64"}, "grpo": {"jagg_window": 3, "jagg_frac": 1.0}},
        CASES[case],
        {"grpo": {"micro_batch_size": 1}, "parallel": parallel},
    )
    experiment = tiny.start(tiny.tiny_config(prompts, **sections))
    if experiment.reference is not None and "lora" not in sections:
        tiny.move_away_from_reference(experiment)
    results = []
    for schedule in schedules:
        runner = experiment.runner(schedule)
        # jagg has scores from its second iteration on.
        for _ in range(2 if schedule == "jagg" else 1):
            metrics = runner.run(0, experiment.sampler.batch(0)).metrics
        named = experiment.policy.model.named_parameters()
        found = {n: p.main_grad.clone() for n, p in named if p.requires_grad}
        results.append((found, metrics))
    return results


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    return tiny.write_prompts(tmp_path_factory.mktemp("prompts"), count=4)


@pytest.fixture(scope="module")
def whole(run_ranks, prompts):
    known: dict[str, list] = {}

    def of(case: str) -> list:
        if case not in known:
            (known[case],) = run_ranks(1, gradients, prompts, case, SCHEDULES)
        return known[case]

    return of


def check(stages: list, expected: list) -> None:
    for n, (gradient, metrics) in enumerate(expected):
        found: dict[str, torch.Tensor] = {}
        for stage in stages:
            own, own_metrics = stage[n]
            assert not found.keys() & own.keys()
            found.update(own)
            for name, value in metrics.items():
                if not name.startswith("time_"):
                    assert own_metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
        # Sums over steps and samples in another order.
        assert tiny.worst(found, gradient)[0] <= 1e-11, (SCHEDULES[n], tiny.worst(found, gradient))


@pytest.mark.parametrize("case", CASES)
def test_two_stages_give_the_gradient_of_one_rank(run_ranks, prompts, whole, case):
    stages = run_ranks(2, gradients, prompts, case, SCHEDULES, pipeline_model_parallel_size=2)
    check(stages, whole(case))
