# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What could go another way on the stages of a pipeline than in one process: it does not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.grpo.iteration import IterationRunner
from megatron_leangrpo.grpo.trajectory import WaveTrajectory
from megatron_leangrpo.precision.scaling import renew_scales
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
        ("retain", "reweight"),
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
        ("replay", "reweight"),
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
}


Updates = list[tuple[list[tiny.Tensors], list[dict[str, float]], dict[str, float]]]


def all_updates(prompts: str, cases: Sequence[str]) -> list[Updates]:
    return [updates(prompts, case, CASES[case][1], 2) for case in cases]


def updates(prompts: str, case: str, schedules: Sequence[str], stages: int) -> Updates:
    """Full gradients of all updates of an iteration, each one's metrics and the iteration's."""
    sections = CASES[case][0]
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


EVERY_DAY = (
    "two updates, in rings that hold waves of both",
    "a smaller last wave whose samples train other steps",
    "groups without signal, groups that are dropped",
    "jagg on reweight, measured",
    "guided in two forwards, the negative prompt detached",
)
OTHERS = tuple(case for case in CASES if case not in EVERY_DAY)


# The others repeat what those show, or single-process tests, with other settings.
@pytest.mark.parametrize(
    "cases", [EVERY_DAY, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=("every day", "others")
)
def test_stages_give_the_updates_of_one_rank(run_ranks, prompts, cases):
    ranks = run_ranks(2, all_updates, prompts, cases, timeout_seconds=300)
    for case, *found in zip(cases, *ranks, strict=True):
        schedules = CASES[case][1]
        # All exact schedules have one gradient.
        used = {schedule: "jagg" if schedule == "jagg" else schedules[0] for schedule in schedules}
        names = list(dict.fromkeys(used.values()))
        (whole,) = run_ranks(1, updates, prompts, case, names, 1)
        for rank in found:
            for schedule, own in zip(schedules, rank, strict=True):
                try:
                    check_updates(own, whole[names.index(used[schedule])])
                except AssertionError as error:
                    raise AssertionError(f"{case}, {schedule}") from error


def check_updates(found: tuple, wanted: tuple) -> None:
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
    "FP8, delayed": {"model": {"dtype": "float32"}, "fp8": {**FP8, "recipe": "delayed"}},
}


def low_precision(
    prompts: str, cases: Sequence[str], stages: int
) -> list[list[tuple[tiny.Tensors, dict[str, float]]]]:
    base = {
        "grpo": {"micro_batch_size": 1, "group_size": 2},
        "parallel": {"pipeline_model_parallel_size": stages},
    }
    results = []
    for case in cases:
        experiment = tiny.start(tiny.tiny_config(prompts, **tiny.merged(base, FLUX, LOW[case])))
        found = []
        for name in ("replay", "retain"):
            found.append(tiny.first_gradient(experiment, name))
            # Delayed scaling quantises the second one by what the first one has seen.
            renew_scales(experiment.model)
        results.append(found)
    return results


@pytest.mark.parametrize(
    "cases",
    [
        ("bfloat16", "FP8, delayed"),
        pytest.param(("bfloat16 videos", "FP8"), marks=pytest.mark.slow),
    ],
    ids="; ".join,
)
def test_what_is_rounded_on_its_way_is_rounded_alike_on_stages(run_ranks, prompts, cases):
    (whole,) = run_ranks(1, low_precision, prompts, cases, 1)
    for rank in run_ranks(2, low_precision, prompts, cases, 2):
        for found, wanted in zip(rank, whole, strict=True):
            for (gradient, metrics), (expected, expected_metrics) in zip(found, wanted):
                # The same numbers, summed in float32 in another order; in bfloat16 1e-2 off.
                assert tiny.worst(gradient, expected)[0] <= 2e-6
                assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
                assert metrics["reward_mean"] == expected_metrics["reward_mean"]


def left_over(prompts: str, schedules: Sequence[str]) -> list[list[int]]:
    """Trajectories, conditionings, graphs and forwards that are alive after an iteration."""
    sections: Sections = {
        "grpo": {
            "micro_batch_size": 1,
            "group_size": 2,
            "updates_per_rollout": 2,
            "jagg_frac": 1.0,
            "jagg_check_interval": 1,
        },
        "parallel": {"pipeline_model_parallel_size": 2},
    }
    experiment = tiny.start(tiny.tiny_config(prompts, **tiny.merged(FLUX, sections)))
    return [_left_over(experiment, experiment.runner(schedule)) for schedule in schedules]


def _left_over(experiment: Experiment, runner: IterationRunner) -> list[int]:
    seen: list[weakref.ref] = []
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
    return [len(seen), alive, len(runner.passes.driver._kept) + len(runner.passes._forwards)]


def test_nothing_of_a_finished_wave_stays_on_any_stage(run_ranks, prompts):
    for rank in run_ranks(2, left_over, prompts, SCHEDULES):
        for seen, alive, kept in rank:
            assert seen == 2 * 4 * 3 and alive == kept == 0


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
