# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What could go another way on the stages of a pipeline than in one process: it does not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection
from typing import Any

import pytest
import torch

from megatron_leangrpo.grpo.precision_report import measure_precision
from megatron_leangrpo.grpo.trajectory import WaveTrajectory
from tests.grpo import tiny
from tests.grpo.test_pipelined import FLUX, SCHEDULES, VIDEO

Sections = dict[str, dict[str, Any]]
DEFERRED = ("replay", "retain", "jagg")


class Uneven(tiny.SmoothReward):
    """All samples of the first prompt are equal, those of the second get no number."""

    def __call__(self, images, prompts, metadata) -> torch.Tensor:
        values = super().__call__(images, prompts, metadata)
        constant = torch.tensor([text.endswith("number 0") for text in prompts])
        failing = torch.tensor([text.endswith("number 1") for text in prompts])
        return values.masked_fill(constant, 1.0).masked_fill(failing, torch.nan)


UNEVEN = {"weights": {f"{__name__}:Uneven": 1.0}, "failure_policy": "drop_group"}
MANY_GROUPS = {"prompts_per_iteration": 4, "group_size": 2}
FP8 = {"recipe": "current", "backend": "reference", "first_last_blocks_bf16": 1}
RANDOM_STEPS = {"step_selection": "random_fraction", "timestep_fraction": 0.7}

# Settings and schedules.
CASES: dict[str, tuple[Sections, tuple[str, ...]]] = {
    "two updates, in rings that hold waves of both": (
        {
            "grpo": {"updates_per_rollout": 2, "group_size": 6, "prompts_per_iteration": 1},
            "parallel": {"pipeline_waves_in_flight": 5},
        },
        SCHEDULES,
    ),
    "a smaller last wave whose samples train other steps": (
        {
            "grpo": {"micro_batch_size": 2, "group_size": 5, "prompts_per_iteration": 1},
            "sampling": RANDOM_STEPS,
        },
        DEFERRED,
    ),
    "groups without signal, groups that are dropped": (
        {"grpo": MANY_GROUPS, "reward": UNEVEN},
        SCHEDULES,
    ),
    "no signal, mean and std of all groups": (
        {"grpo": {**MANY_GROUPS, "advantage": "dance_global"}, "reward": UNEVEN},
        ("replay", "reweight"),
    ),
    "two rewards by GDPO, in batches over all groups": (
        {
            "grpo": {"reward_combination": "gdpo", "advantage": "flow_grpo_global_std"},
            "reward": {"weights": {tiny.SMOOTH: 1.0, tiny.CENTRE: 0.5}},
        },
        SCHEDULES,
    ),
    "jagg on reweight, measured": (
        {"grpo": {"jagg_on": "reweight", "jagg_check_interval": 1, "jagg_window": 2}},
        ("jagg",),
    ),
    "jagg on replay with windows of three, measured": (
        {
            "grpo": {"jagg_on": "replay", "jagg_check_interval": 1, "micro_batch_size": 2},
            "sampling": {"num_steps": 6},
        },
        ("jagg",),
    ),
    "guided, the negative prompt detached": (
        {"sampling": {"cfg_scale": 3.0}, "grpo": {"cfg_detach": True}},
        ("replay", "reweight"),
    ),
    "guided in two forwards": (
        {"sampling": {"cfg_scale": 3.0, "cfg_forwards": "separate"}},
        ("replay", "reweight"),
    ),
    "guided in two forwards, the negative prompt detached": (
        {
            "sampling": {"cfg_scale": 3.0, "cfg_forwards": "separate"},
            "grpo": {"cfg_detach": True, "kl_beta": 0.5},
        },
        ("retain", "reweight"),
    ),
    "whole blocks recomputed": (
        {"model": {"recompute_granularity": "full"}},
        ("replay", "retain", "reweight"),
    ),
    "attention recomputed in videos": (
        {
            **VIDEO,
            "model": {**VIDEO["model"], "recompute_granularity": "selective"},
            "grpo": {"kl_beta": 0.5},
        },
        ("retain", "reweight"),
    ),
}


def updates(
    prompts: str, case: str, stages: int
) -> list[tuple[list[tiny.Tensors], list[dict[str, float]], dict[str, float]]]:
    """Full gradients of all updates of an iteration, each one's metrics and the iteration's."""
    sections, schedules = CASES[case]
    base: Sections = {
        "model": {"dtype": "float64"},
        "grpo": {"micro_batch_size": 1, "jagg_window": 3, "jagg_frac": 1.0},
        "parallel": {"pipeline_model_parallel_size": stages},
    }
    experiment = tiny.start(tiny.tiny_config(prompts, **tiny.merged(base, FLUX, sections)))
    if experiment.reference is not None:
        tiny.move_away_from_reference(experiment)
    weights = list(experiment.policy.model.parameters())
    start = [weight.detach().clone() for weight in weights]
    results = []
    for schedule in schedules:
        runner = experiment.runner(schedule)
        # jagg has scores from its second iteration on.
        for _ in range(2 if schedule == "jagg" else 1):
            gradients: list[tiny.Tensors] = []
            with torch.no_grad():
                for weight, value in zip(weights, start):
                    weight.copy_(value)

            @torch.no_grad()
            def descend(gradients: list[tiny.Tensors] = gradients) -> dict[str, float]:
                gradients.append(experiment.architecture.export_gradients(experiment.model))
                for weight in weights:
                    weight.sub_(1e-3 * weight.main_grad)
                return {}

            result = runner.run(0, experiment.sampler.batch(0), descend)
        results.append((gradients, result.updates, result.metrics))
    return results


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    return tiny.write_prompts(tmp_path_factory.mktemp("prompts"), count=4)


def check_metrics(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not name.startswith("time_"):
            assert found[name] == pytest.approx(value, rel=1e-8, abs=1e-12, nan_ok=True), name


# The others repeat what these show, or single-process tests, with other settings.
EVERY_DAY = (
    "two updates, in rings that hold waves of both",
    "a smaller last wave whose samples train other steps",
    "groups without signal, groups that are dropped",
    "jagg on reweight, measured",
    "guided in two forwards, the negative prompt detached",
    "bfloat16",
)


def slow_but(names: Collection[str], every_day: Collection[str]) -> list:
    return [pytest.param(n, marks=() if n in every_day else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("case", slow_but(CASES, EVERY_DAY))
def test_stages_give_the_updates_of_one_rank(run_ranks, prompts, case):
    (expected,) = run_ranks(1, updates, prompts, case, 1)
    for rank in run_ranks(2, updates, prompts, case, 2):
        for found, wanted in zip(rank, expected, strict=True):
            for gradient, exact in zip(found[0], wanted[0], strict=True):
                # Sums over steps and waves in another order.
                assert tiny.worst(gradient, exact)[0] <= 1e-11
                assert any(tensor.any() for tensor in exact.values())
            for update, exact_update in zip(found[1], wanted[1], strict=True):
                check_metrics(update, exact_update)
            check_metrics(found[2], wanted[2])
            assert found[1][0]["ratio_min"] == found[1][0]["ratio_max"] == 1.0
            if len(found[1]) > 1:
                assert found[1][1]["ratio_min"] != 1.0 != found[1][1]["ratio_max"]


LOW: dict[str, Sections] = {
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "bfloat16 videos": tiny.merged(VIDEO, {"model": {"dtype": "bfloat16"}}),
    "FP8": {"model": {"dtype": "float32"}, "fp8": FP8},
}


def low_precision(
    prompts: str, case: str, stages: int
) -> list[tuple[tiny.Tensors, dict[str, float]]]:
    base = {
        "grpo": {"micro_batch_size": 1},
        "parallel": {"pipeline_model_parallel_size": stages},
    }
    experiment = tiny.start(tiny.tiny_config(prompts, **tiny.merged(base, FLUX, LOW[case])))
    return [tiny.first_gradient(experiment, name) for name in ("replay", "retain")]


@pytest.mark.parametrize("case", slow_but(LOW, EVERY_DAY))
def test_what_is_rounded_on_its_way_is_rounded_alike_on_stages(run_ranks, prompts, case):
    (whole,) = run_ranks(1, low_precision, prompts, case, 1)
    for rank in run_ranks(2, low_precision, prompts, case, 2):
        for (gradient, metrics), (expected, expected_metrics) in zip(rank, whole, strict=True):
            # The same numbers, summed in float32 in another order; bfloat16 would be off by 1e-2.
            assert tiny.worst(gradient, expected)[0] <= 2e-6
            assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
            assert metrics["reward_mean"] == expected_metrics["reward_mean"]


def left_over(prompts: str, schedule: str) -> list[int]:
    """Trajectories, conditionings and messages that are alive after an iteration."""
    sections: Sections = {
        "grpo": {
            "micro_batch_size": 1,
            "updates_per_rollout": 2,
            "jagg_frac": 1.0,
            "jagg_check_interval": 1,
        },
        "parallel": {"pipeline_model_parallel_size": 2},
    }
    experiment = tiny.start(tiny.tiny_config(prompts, **tiny.merged(FLUX, sections)))
    runner, seen = experiment.runner(schedule), []
    roll_out = runner.passes.roll_out

    def watched(*arguments: Any) -> list[WaveTrajectory]:
        trajectories = roll_out(*arguments)
        for trajectory in trajectories:
            seen.append(weakref.ref(trajectory))
            seen.append(weakref.ref(trajectory.latents))
            seen.append(weakref.ref(trajectory.conditioning))
        return trajectories

    runner.passes.roll_out = watched
    for iteration in range(2):
        runner.run(iteration, experiment.sampler.batch(iteration), dict)
    gc.collect()
    alive = sum(reference() is not None for reference in seen)
    return [len(seen), alive, len(runner.passes.driver._kept)]


@pytest.mark.parametrize("schedule", slow_but(SCHEDULES, ["reweight", "jagg"]))
def test_nothing_of_a_finished_wave_stays_on_any_stage(run_ranks, prompts, schedule):
    for seen, alive, graphs in run_ranks(2, left_over, prompts, schedule):
        assert seen == 2 * 8 * 3 and alive == graphs == 0


def most_graphs(prompts: str) -> int:
    """Waves 5 to 8 are on-policy, two of each group; the second ring has waves 4 to 6."""
    sections: Sections = {
        "grpo": {"micro_batch_size": 1, "updates_per_rollout": 2},
        "parallel": {"pipeline_model_parallel_size": 2, "pipeline_waves_in_flight": 3},
    }
    experiment = tiny.start(tiny.tiny_config(prompts, **tiny.merged(FLUX, sections)))
    runner = experiment.runner("retain")
    runner.run(0, experiment.sampler.batch(0), dict)
    return runner.passes.driver.most_kept


def test_a_ring_that_begins_off_policy_frees_the_graphs_of_a_complete_group(run_ranks, prompts):
    # Three trained steps of two waves, not of four.
    assert run_ranks(2, most_graphs, prompts) == [6, 6]


def report_and_evaluation(prompts: str, stages: int) -> tuple:
    sections: Sections = {
        "model": {"dtype": "bfloat16"},
        "parallel": {"pipeline_model_parallel_size": stages},
        "evaluation": {"micro_batch_size": 1, "max_prompts": 3},
    }
    experiment = tiny.start(tiny.tiny_config(prompts, **tiny.merged(FLUX, sections)))
    precision = measure_precision(experiment)
    evaluation = experiment.evaluator().run()
    return precision.noise, evaluation.scores


def test_precision_and_evaluation_are_those_of_one_rank(run_ranks, prompts):
    ((noise, scores),) = run_ranks(1, report_and_evaluation, prompts, 1)
    assert noise > 0
    for found, found_scores in run_ranks(2, report_and_evaluation, prompts, 2):
        assert found == noise and torch.equal(found_scores, scores)
