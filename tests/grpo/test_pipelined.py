# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A transformer cut into pipeline stages has the gradients of the whole one, on every schedule."""

from __future__ import annotations

from collections.abc import Sequence
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
# How memory is saved is part of some: it changes nothing in one process, other tests show.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "flux": FLUX,
    "flux, recomputed, KL against a reference in host memory, clipped advantages": tiny.merged(
        FLUX,
        {
            "model": {"recompute_granularity": "full"},
            "grpo": {
                "kl_beta": 0.5,
                "kl_form": "velocity_mse",
                "adv_clip": 0.5,
                "reference_offload": True,
            },
        },
    ),
    "flux, LoRA, KL": tiny.merged(FLUX, {"lora": {"rank": 2}, "grpo": {"kl_beta": 0.5}}),
    "videos by two experts, the idle one in host memory, guided in two forwards, KL": tiny.merged(
        tiny.WAN,
        {
            "model": {"preset": "wan_experts_of_four", "expert_offload": True},
            "sampling": {"cfg_scale": 4.0, "cfg_forwards": "separate"},
            "grpo": {"kl_beta": 0.5, "kl_form": "exact"},
        },
    ),
    "videos, attention recomputed, guided in one batch": tiny.merged(
        VIDEO,
        {"model": {"recompute_granularity": "selective"}, "sampling": {"cfg_scale": 4.0}},
    ),
    "a window for each sample, std of all groups": tiny.merged(
        FLUX,
        {
            "sampling": {"step_selection": "random_fraction", "timestep_fraction": 0.7},
            "grpo": {"advantage": "flow_grpo_global_std"},
        },
    ),
}
_, KL, LORA, EXPERTS, GUIDED, WINDOWS = CASES


def gradients(
    prompts: str, case: str, schedules: Sequence[str] = SCHEDULES, **layout: Any
) -> list[tuple[tiny.Tensors, dict[str, float]]]:
    """The full gradient and the metrics of the first iteration under each schedule.

    `layout` are settings of `parallel`, of which `overlap` and `optimizer` are sections apart.
    """
    apart = {name: layout.pop(name) for name in ("overlap", "optimizer") if name in layout}
    sections = tiny.merged(
        {"model": {"dtype": "float64"}, "grpo": {"jagg_window": 3, "jagg_frac": 1.0}},
        CASES[case],
        {"grpo": {"group_size": 3, "micro_batch_size": 1}, "parallel": layout},
        apart,
    )
    experiment = tiny.start(tiny.tiny_config(prompts, **sections))
    if experiment.reference is not None and "lora" not in sections:
        tiny.move_away_from_reference(experiment)
    found: list[tiny.Tensors] = []

    def export() -> dict[str, float]:
        found.append(experiment.architecture.export_gradients(experiment.model))
        return {}

    optimizer = experiment.config.optimizer
    # With the distributed optimizer no rank has the whole gradient of an update.
    sums_early = optimizer.overlap_grad_reduce and not optimizer.use_distributed_optimizer
    results = []
    for schedule in schedules:
        runner = experiment.runner(schedule)
        # jagg has scores from its second iteration on.
        for _ in range(2 if schedule == "jagg" else 1):
            batch = experiment.sampler.batch(0)
            metrics = runner.run(0, batch, export if sums_early else None).metrics
        if not sums_early:
            export()
        results.append((found[-1], metrics))
    return results


def several(prompts: str, runs: Sequence[Run]) -> list[list]:
    return [gradients(prompts, case, schedules, **layout) for case, schedules, layout in runs]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    return tiny.write_prompts(tmp_path_factory.mktemp("prompts"), count=4)


@pytest.fixture(scope="module")
def whole(run_ranks, prompts):
    """The gradient and metrics of one process: those of replay, but for the approximate jagg."""
    known: dict[tuple[str, str], tuple[tiny.Tensors, dict[str, float]]] = {}

    def of(case: str, schedule: str) -> tuple[tiny.Tensors, dict[str, float]]:
        key = case, "jagg" if schedule == "jagg" else "replay"
        if key not in known:
            ((known[key],),) = run_ranks(1, gradients, prompts, case, key[1:])
        return known[key]

    return of


def check(found: tuple[tiny.Tensors, dict], expected: tuple[tiny.Tensors, dict]) -> None:
    (gradient, metrics), (expected_gradient, expected_metrics) = found, expected
    # Sums over steps, samples and ranks in another order.
    worst = tiny.worst(gradient, expected_gradient)
    assert worst[0] <= 1e-11, worst
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
    for name, value in expected_metrics.items():
        if not name.startswith("time_"):
            assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


# Every schedule meets every case on two stages, every day one of them. Other layouts meet the one
# that does everything in one phase, and some the one that runs everything twice.
ONE_EACH = {
    "flux": SCHEDULES,
    KL: ("replay",),
    LORA: ("reweight",),
    EXPERTS: ("retain",),
    GUIDED: ("reweight",),
    WINDOWS: ("jagg",),
}
BOTH = ("replay", "reweight")
Run = tuple[str, Sequence[str], dict[str, Any]]
PLAIN_EARLY = {"use_distributed_optimizer": False, "overlap_grad_reduce": True}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
TENSOR, CONTEXT = {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}
FLASH, BULK = {"overlap": {"mode": "flash"}}, {"overlap": {"mode": "bulk"}}


def cuts(stages: int, splits: Sequence[list[int]]) -> list[Run]:
    layout = {"pipeline_model_parallel_size": stages}
    return [
        (case, ("reweight",), {**layout, "pipeline_split": split})
        for case in ("flux", GUIDED)
        for split in splits
    ]


def two(case: str, schedules: Sequence[str] = SCHEDULES, **layout: Any) -> Run:
    return case, schedules, {"pipeline_model_parallel_size": 2, **layout}


# By number of ranks and name.
RUNS: dict[tuple[int, str], list[Run]] = {
    (2, "every case"): [two(case, schedules) for case, schedules in ONE_EACH.items()],
    (2, "every schedule"): [
        two(case, tuple(s for s in SCHEDULES if s not in schedules))
        for case, schedules in ONE_EACH.items()
        if case != "flux"
    ],
    (2, "cuts, waves in flight"): [
        *cuts(2, [[1, 3], [3, 1]]),
        two("flux", ("replay",), pipeline_waves_in_flight=8),
        two("flux", ("reweight",), pipeline_waves_in_flight=1),
    ],
    (3, "cuts"): cuts(3, [[1, 1, 2], [1, 2, 1], [2, 1, 1]]),
    (4, "cuts, tp, cp, dp"): [
        *cuts(4, [[1, 1, 1, 1]]),
        two("flux", BOTH, **TENSOR, **FLASH),
        two(GUIDED, ("reweight",), **CONTEXT, **FLASH),
        two("flux", BOTH, optimizer=PLAIN_EARLY),
    ],
    (8, "tp x dp, tp x cp"): [
        two(KL, ("replay",), **TENSOR, **BULK, optimizer=SHARDED),
        two(LORA, ("retain",), **TENSOR, **FLASH),
        two(EXPERTS, ("reweight",), **TENSOR, **CONTEXT, **FLASH),
    ],
}
EVERY_DAY = ((2, "every case"), (2, "cuts, waves in flight"))


@pytest.mark.parametrize(
    "runs",
    [pytest.param(r, marks=() if r in EVERY_DAY else pytest.mark.slow) for r in RUNS],
    ids=lambda runs: f"{runs[0]} ranks, {runs[1]}",
)
def test_stages_give_the_gradient_of_one_rank(run_ranks, prompts, whole, runs):
    ranks = run_ranks(runs[0], several, prompts, RUNS[runs], timeout_seconds=300)
    for (case, schedules, layout), *found in zip(RUNS[runs], *ranks, strict=True):
        for rank, results in enumerate(found):
            for schedule, result in zip(schedules, results, strict=True):
                try:
                    check(result, whole(case, schedule))
                except AssertionError as error:
                    raise AssertionError(f"{case}, {schedule}, {layout}, rank {rank}") from error


def traces(prompts: str, schedules: Sequence[str]) -> list[tuple[list, int]]:
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
    experiment, found = tiny.start(config), []
    for schedule in schedules:
        runner, done = experiment.runner(schedule), []
        runner.passes.driver.on_operation = done.append
        runner.run(0, [Prompt(0, "one")])
        found.append((done, runner.passes.driver.most_kept))
    return found


def test_stages_do_what_the_order_says_and_keep_as_many_graphs_as_it_counts(run_ranks, prompts):
    trained, schedules = range(3), ("replay", "retain", "reweight")
    for stage, found in enumerate(run_ranks(2, traces, prompts, schedules)):
        for schedule, (done, kept) in zip(schedules, found, strict=True):
            planned = phases(schedule, 2, 4, same_windows(4, trained))
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
