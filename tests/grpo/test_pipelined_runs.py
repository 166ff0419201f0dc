# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The commands over pipeline stages: what they print and write, and how they end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_leangrpo import cli, platform
from megatron_leangrpo.grpo import commands
from megatron_leangrpo.grpo.pipelined import PipelinedModel
from megatron_leangrpo.grpo.precision_report import measure_precision
from megatron_leangrpo.pipeline.order import Item
from tests.distributed.launcher import CONTEXT
from tests.grpo import tiny
from tests.grpo.test_pipelined import FLUX, WAN_PRESETS  # its presets

assert "wan_experts_of_four" in WAN_PRESETS
TWO_STAGES = "--parallel.pipeline_model_parallel_size=2"
TIMEOUT_SECONDS = 60


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> str:
    """Two experts, the idle one in host memory, with averaged weights that are evaluated."""
    folder = tmp_path_factory.mktemp("recipe")
    config = tiny.tiny_config(
        tiny.write_prompts(folder),
        **tiny.merged(
            tiny.WAN,
            {
                "model": {"preset": "wan_experts_of_four", "expert_offload": True},
                "grpo": {"iterations": 2, "group_size": 2, "micro_batch_size": 1},
                "optimizer": {"lr": 1e-2, "ema_decay": 0.9, "ema_interval": 1},
                "evaluation": {"interval": 1, "max_prompts": 3, "micro_batch_size": 1},
                "checkpoint": {"interval": 0},
            },
        ),
    )
    return tiny.write_recipe(config, folder)


def all_commands(recipe: str, folder: str, *layout: str) -> None:
    """Train, then evaluate the run's average and last weights, then draw samples of it."""
    run, evaluation, samples = (
        str(Path(folder, name)) for name in ("run", "evaluation", "samples")
    )
    tiny.train_command(recipe, [f"--output={run}", *layout])
    with mock.patch.object(platform, "destroy_distributed"):
        commands.evaluate(recipe, [f"--output={evaluation}", *layout], [run, f"{run}:live"])
        commands.sample(recipe, [f"--output={samples}", *layout], run)


def numbers_of(folder: Path) -> dict[str, float]:
    """All numbers that the commands have written, but for times."""
    numbers: dict[str, float] = {}
    for row in tiny.metrics_rows(folder / "run"):
        measured = ("time_", "samples_per_", "tokens_per_", "tflops_")
        for name, value in row.items():
            if isinstance(value, float) and not name.startswith(measured):
                numbers[f"{row['iteration']} {name}"] = value
    summary = json.loads((folder / "run" / "summary.json").read_text())
    for row in summary["evaluations"]:
        numbers[f"average after {row['iteration']}"] = row["reward"]
    models = json.loads((folder / "evaluation" / "evaluation.json").read_text())["models"]
    for model, results in models.items():
        numbers[model] = results["scores"]["reward"]["mean"]
    return numbers


def test_commands_over_two_stages_write_the_numbers_of_one_process(run_ranks, recipe, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    run_ranks(1, all_commands, recipe, str(one))
    run_ranks(2, all_commands, recipe, str(two), TWO_STAGES)
    expected = numbers_of(one)
    assert len({expected[f"average after {iteration}"] for iteration in range(3)}) == 3
    # float32 in another order, through AdamW, whose first step is a sign.
    assert numbers_of(two) == pytest.approx(expected, rel=1e-4, abs=1e-6, nan_ok=True)
    pictures = sorted(path.name for path in (one / "samples" / "samples").iterdir())
    assert pictures == sorted(path.name for path in (two / "samples" / "samples").iterdir())


def report_and_evaluation(prompts: str, stages: int) -> tuple:
    sections = {
        "model": {"dtype": "bfloat16"},
        "parallel": {"pipeline_model_parallel_size": stages},
        "evaluation": {"micro_batch_size": 1, "max_prompts": 3},
    }
    experiment = tiny.start(tiny.tiny_config(prompts, **tiny.merged(FLUX, sections)))
    precision = measure_precision(experiment)
    evaluation = experiment.evaluator().run()
    return precision.noise, evaluation.scores


def test_precision_and_evaluation_are_those_of_one_rank(run_ranks, tmp_path):
    prompts = tiny.write_prompts(tmp_path, count=4)
    ((noise, scores),) = run_ranks(1, report_and_evaluation, prompts, 1)
    assert noise > 0
    for found, found_scores in run_ranks(2, report_and_evaluation, prompts, 2):
        assert found == noise and torch.equal(found_scores, scores)


def _train(rank: int, recipe: str, folder: str) -> None:
    """`leangrpo train` on one of two ranks; the second stage fails in the middle of a rollout."""
    store = dist.FileStore(str(Path(folder, "store")), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    os.dup2(os.open(Path(folder, f"stderr {rank}"), os.O_WRONLY | os.O_CREAT), 2)
    run_stage = PipelinedModel._run_stage

    def fails(self: PipelinedModel, item: Item, inputs: tuple) -> tuple:
        if rank == 1 and item.step == 2 and self._rollouts[item.trajectory].windows:
            raise RuntimeError("the second stage's device is lost")
        return run_stage(self, item, inputs)

    with mock.patch.object(PipelinedModel, "_run_stage", fails):
        timeout = f"--parallel.timeout_seconds={TIMEOUT_SECONDS}"
        cli.main(["train", recipe, f"--output={folder}/run", TWO_STAGES, timeout])


def test_a_stage_that_fails_in_a_rollout_ends_the_run_on_all_ranks_with_a_message(recipe, tmp_path):
    # Processes of their own: the launcher of tests ends the survivors with the dead.
    ranks = [CONTEXT.Process(target=_train, args=(n, recipe, str(tmp_path))) for n in range(2)]
    for process in ranks:
        process.start()
    try:
        ranks[1].join(120)
        # Its connections are closed: the other one need not wait for its timeout.
        ranks[0].join(TIMEOUT_SECONDS)
        assert [process.exitcode for process in ranks] == [1, 1]
    finally:
        for process in ranks:
            process.kill()
    survivor, failed = ((tmp_path / f"stderr {n}").read_text() for n in range(2))
    assert "leangrpo: error on rank 1: the second stage's device is lost" in failed
    assert "leangrpo: error on rank 0: pipeline stage 0 of 2, " in survivor
    assert "stage 1 within" in survivor and "of trajectory" in survivor
