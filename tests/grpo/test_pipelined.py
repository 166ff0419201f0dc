# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A transformer cut into pipeline stages has the gradients of the whole one, on every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.conditioning.prompts import Prompt
from megatron_leangrpo.models.flux.config import PRESETS
from megatron_leangrpo.models.wan.config import PRESETS as WAN_PRESETS
from megatron_leangrpo.operations.finite import NotFiniteError
from megatron_leangrpo.pipeline.order import graphs_in_flight, phases, same_windows
from tests.grpo import tiny

PRESETS["flux_of_four"] = lambda **o: tiny.flux_smallest(
    **{"num_double_blocks": 2, "num_single_blocks": 2, **o}
)
WAN_PRESETS["wan_of_four"] = lambda **o: tiny.wan_smallest(**{"num_layers": 4, **o})
WAN_PRESETS["wan_experts_of_four"] = lambda **o: tiny.wan_smallest_experts(**{"num_layers": 4, **o})
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


def gradients(
    prompts: str, case: str, schedules: tuple[str, ...] = SCHEDULES, **layout: Any
) -> list[tuple[tiny.Tensors, dict[str, float]]]:
    """The full gradient and the metrics of the first iteration under each schedule.

    `layout` are settings of `parallel`, of which `overlap` and `optimizer` are sections apart.
    """
    apart = {name: layout.pop(name) for name in ("overlap", "optimizer") if name in layout}
    sections = tiny.merged(
        {"model": {"dtype": "float64"}, "grpo": {"jagg_window": 3, "jagg_frac": 1.0}},
        CASES[case],
        {"grpo": {"micro_batch_size": 1}, "parallel": layout},
        apart,
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
        results.append((experiment.architecture.export_gradients(experiment.model), metrics))
    return results


def several(prompts: str, runs: list[tuple[str, dict[str, Any]]], schedules: tuple[str, ...]):
    return [gradients(prompts, case, schedules, **layout) for case, layout in runs]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    return tiny.write_prompts(tmp_path_factory.mktemp("prompts"), count=4)


@pytest.fixture(scope="module")
def whole(run_ranks, prompts):
    known: dict[str, list] = {}

    def of(case: str) -> list:
        if case not in known:
            (known[case],) = run_ranks(1, gradients, prompts, case)
        return known[case]

    return of


def check(found: list, expected: list, schedules: tuple[str, ...] = SCHEDULES) -> None:
    by_schedule = dict(zip(SCHEDULES, expected))
    for schedule, (gradient, metrics) in zip(schedules, found, strict=True):
        expected_gradient, expected_metrics = by_schedule[schedule]
        # Sums over steps, samples and ranks in another order.
        worst = tiny.worst(gradient, expected_gradient)
        assert worst[0] <= 1e-11, (schedule, worst)
        assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
        for name, value in expected_metrics.items():
            if not name.startswith("time_"):
                assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("case", CASES)
def test_two_stages_give_the_gradient_of_one_rank(run_ranks, prompts, whole, case):
    for found in run_ranks(2, gradients, prompts, case, pipeline_model_parallel_size=2):
        check(found, whole(case))


CUTS = {2: [[1, 3], [3, 1]], 3: [[1, 1, 2], [1, 2, 1], [2, 1, 1]], 4: [[1, 1, 1, 1]]}


@pytest.mark.parametrize("stages", CUTS)
def test_blocks_may_be_cut_anywhere(run_ranks, prompts, whole, stages):
    schedules = ("replay", "reweight")
    runs = [
        (case, {"pipeline_model_parallel_size": stages, "pipeline_split": split})
        for case in ("flux", "videos, guided in one batch")
        for split in CUTS[stages]
    ]
    for rank in run_ranks(stages, several, prompts, runs, schedules):
        for (case, _), found in zip(runs, rank, strict=True):
            check(found, whole(case), schedules)


EARLY = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
# World size, case, settings.
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tp 2 x pp 2, flash": (
        4,
        "flux",
        {"tensor_model_parallel_size": 2, "overlap": {"mode": "flash"}},
    ),
    "pp 2 x dp 2, gradients summed early": (4, "flux", {"optimizer": EARLY}),
    "cp 2 x pp 2, flash": (
        4,
        "videos, guided in one batch",
        {"context_parallel_size": 2, "overlap": {"mode": "flash"}},
    ),
    "more waves than stages": (2, "flux", {"pipeline_waves_in_flight": 8}),
    "fewer waves than stages": (2, "flux", {"pipeline_waves_in_flight": 1}),
    "tp 2 x pp 2 x dp 2, bulk": (
        8,
        "flux, KL, clipped advantages",
        {"tensor_model_parallel_size": 2, "overlap": {"mode": "bulk"}, "optimizer": EARLY},
    ),
    "tp 2 x pp 2 x dp 2, flash, LoRA": (
        8,
        "flux, LoRA, KL",
        {"tensor_model_parallel_size": 2, "overlap": {"mode": "flash"}},
    ),
}
EIGHT_RANKS = [
    pytest.param(name, marks=pytest.mark.slow if layout[0] == 8 else ())
    for name, layout in LAYOUTS.items()
]


@pytest.mark.parametrize("layout", EIGHT_RANKS)
def test_stages_go_with_every_other_kind_of_parallelism(run_ranks, prompts, whole, layout):
    ranks, case, settings = LAYOUTS[layout]
    settings = {"pipeline_model_parallel_size": 2, **settings}
    for found in run_ranks(ranks, gradients, prompts, case, timeout_seconds=300, **settings):
        check(found, whole(case))


def trace(prompts: str, schedule: str) -> tuple[list, int]:
    """What this stage did in an iteration, and how many graphs it kept at once."""
    config = tiny.tiny_config(
        prompts,
        **tiny.merged(
            FLUX,
            {
                "grpo": {"micro_batch_size": 1, "placement": "local"},
                "parallel": {"pipeline_model_parallel_size": 2, "pipeline_waves_in_flight": 4},
            },
        ),
    )
    runner, done = tiny.start(config).runner(schedule), []
    runner.passes.driver.on_operation = done.append
    runner.run(0, [Prompt(0, "one")])
    return done, runner.passes.driver.most_kept


@pytest.mark.parametrize("schedule", ["replay", "retain", "reweight"])
def test_stages_do_what_the_order_says_and_keep_as_many_graphs_as_it_counts(
    run_ranks, prompts, schedule
):
    trained = range(3)
    planned = phases(schedule, 2, 4, same_windows(4, trained))
    for stage, (done, kept) in enumerate(run_ranks(2, trace, prompts, schedule)):
        assert done == [op for phase in planned for op in phase.programs[stage]]
        assert kept == graphs_in_flight(schedule, 2, stage, 4, len(trained))


def spoilt(prompts: str) -> str:
    config = tiny.merged(FLUX, {"parallel": {"pipeline_model_parallel_size": 2}})
    experiment = tiny.start(tiny.tiny_config(prompts, **config))
    if platform.pp_rank() == 0:
        with torch.no_grad():
            experiment.policy.model.img_in.weight.fill_(torch.nan)
    try:
        tiny.first_gradient(experiment, "retain")
    except NotFiniteError as error:
        return str(error)
    return ""


def test_latents_that_are_not_finite_end_every_stage_alike(run_ranks, prompts):
    for message in run_ranks(2, spoilt, prompts):
        assert "is not finite in step 1 of 4 of iteration 1" in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--parallel.pipeline_model_parallel_size=5"], "valid values: 1 to 4"),
        (
            ["--parallel.pipeline_model_parallel_size=2", "--parallel.pipeline_split=[1, 2]"],
            "parallel.pipeline_split",
        ),
        (
            ["--parallel.pipeline_model_parallel_size=2", "--grpo.reference_offload=true"],
            "grpo.reference_offload",
        ),
        (["--parallel.pipeline_model_parallel_size=0"], "parallel.pipeline_model_parallel_size"),
        (["--parallel.pipeline_waves_in_flight=-1"], "parallel.pipeline_waves_in_flight"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_by_name(leangrpo, arguments, expected):
    leangrpo.refuses([expected], "train", "flux_tiny", "--dry-run", *arguments)


def test_too_few_waves_are_said_with_what_they_cost(leangrpo):
    stages = "--parallel.pipeline_model_parallel_size=4"
    few = leangrpo("train", "flux_tiny", "--dry-run", stages)
    assert few.status == 0 and "pipeline parallel 4 (blocks 1 + 1 + 1 + 1)" in few.out
    assert "2 trajectories are in flight on 4 pipeline stages" in few.out + few.err
    enough = leangrpo("train", "flux_tiny", "--dry-run", stages, "--grpo.micro_batch_size=30")
    assert enough.status == 0 and "in flight on" not in enough.out + enough.err
