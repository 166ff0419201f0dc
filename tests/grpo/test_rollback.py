# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A run whose reward collapses goes back to its best checkpoint, on all ranks, and not for ever."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.store import checkpoints, read_manifest
from megatron_leangrpo.grpo.config_checks import check_training
from megatron_leangrpo.grpo.trainer import Trainer
from megatron_leangrpo.operations.alarms import Alarms
from tests.checkpoint.test_resume import comparable_rows, tensors_of
from tests.grpo import tiny

COLLAPSE = 8
"""The iteration whose rewards, and all later ones, are lower than anything before."""
REWARD = "--reward.weights={tests.grpo.test_rollback:FallingReward: 1.0}"
LR = 1e-3


class FallingReward(tiny.SmoothReward):
    """A smooth reward that loses a constant, which no advantage sees, from some iteration on."""

    iteration = 0

    def __call__(self, images, prompts, metadata) -> torch.Tensor:
        lost = 10.0 if FallingReward.iteration >= COLLAPSE else 0.0
        return super().__call__(images, prompts, metadata) - lost


def write_recipe(folder: Path) -> str:
    config = tiny.tiny_config(
        tiny.write_prompts(folder),
        grpo={"iterations": COLLAPSE + 1, "group_size": 2, "micro_batch_size": 2},
        optimizer={"lr": LR, "ema_decay": 0.9, "ema_interval": 1},
        evaluation={"interval": 2, "num_steps": 1, "max_prompts": 1, "grid_images": 1},
        checkpoint={"interval": 2, "export_interval": -1, "keep": 1},
        operations={"rollbacks": 1, "rollback_lr_factor": 0.25},
    )
    return tiny.write_recipe(config, folder)


def train(recipe: str, output: str, *overrides: str, killed_in: int | None = None) -> None:
    """`leangrpo train`, where the reward knows the iteration."""
    inner = Trainer._train

    def told(self: Trainer, iteration: int):
        FallingReward.iteration = iteration + 1
        return inner(self, iteration)

    FallingReward.iteration = 0
    with mock.patch.object(Trainer, "_train", told):
        tiny.train_command(recipe, [REWARD, f"--output={output}", *overrides], killed_in)


def best_and_rest(run: Path) -> tuple[int, list[int]]:
    """The evaluated checkpoint that the run went back to, by its summary, and all that are left."""
    rows = json.loads((run / "summary.json").read_text())["evaluations"]
    best = max((row["reward"], row["iteration"]) for row in rows if row["iteration"])[1]
    return best, [step for step, _ in checkpoints(run / "checkpoints")]


def assert_went_back(run: Path, collapse_saved: int = COLLAPSE) -> None:
    """What is saved after the collapse is the best checkpoint, but for the schedule's position."""
    platform.initialize_distributed()
    best, kept = best_and_rest(run)
    assert best in kept, "the best checkpoint stays, whatever checkpoint.keep says"
    own, expected = tensors_of(run, collapse_saved), tensors_of(run, best)
    assert own.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(own[name], expected[name])] == []
    manifest = read_manifest(run / "checkpoints" / f"step_{collapse_saved:06}")
    assert (manifest.rollbacks, manifest.reward) == (1, None)
    platform.destroy_distributed()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> str:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="float32"),
        # Master weights, which the rounded ones are made from.
        pytest.param(["--model.dtype=bfloat16"], id="bfloat16", marks=pytest.mark.slow),
        pytest.param(["--lora.rank=2"], id="adapters", marks=pytest.mark.slow),
    ],
)
def test_weights_average_and_optimizer_go_back_and_the_run_goes_on(recipe, tmp_path, capfd, more):
    # The checkpoint after the last iteration would be the only one kept beside the best.
    run = tmp_path / "run"
    train(recipe, str(run), "--checkpoint.keep=2", *more)
    out = capfd.readouterr().out
    assert out.count("the reward has fallen from") == 1
    best, _ = best_and_rest(run)
    (line,) = [line for line in out.splitlines() if line.startswith("rollback 1 of 1")]
    assert f"after iteration {COLLAPSE}: " in line and f"after iteration {best};" in line
    assert_went_back(run)
    rows = tiny.metrics_rows(run)
    assert [row["iteration"] for row in rows] == list(range(1, COLLAPSE + 2))
    assert [row["rollbacks"] for row in rows] == [0] * COLLAPSE + [1]
    assert [row["learning_rate"] for row in rows] == pytest.approx([LR] * COLLAPSE + [LR / 4])
    events = [json.loads(row) for row in (run / "logs/rank_00000.jsonl").read_text().splitlines()]
    assert [e["iteration"] for e in events if e["event"] == "rollback"] == [COLLAPSE]


@pytest.mark.slow
def test_runs_that_are_killed_before_and_after_go_back_as_an_undisturbed_one(recipe, tmp_path):
    straight = tmp_path / "straight"
    train(recipe, str(straight))
    for killed_in in (COLLAPSE, COLLAPSE + 1):
        run = tmp_path / f"killed{killed_in}"
        train(recipe, str(run), killed_in=killed_in)
        train(recipe, str(run), "--checkpoint.resume=true")
        assert comparable_rows(run) == comparable_rows(straight)
    platform.destroy_distributed()


@pytest.mark.slow
def test_all_ranks_go_back_together(run_ranks, recipe, tmp_path):
    run_ranks(2, train, recipe, str(tmp_path / "run"), "--checkpoint.keep=2")
    assert_went_back(tmp_path / "run")


def test_rollbacks_are_bounded_and_wait_for_an_evaluated_checkpoint(recipe, tmp_path, capfd):
    spike = {"spike": "the gradient norm is 1e9"}
    with mock.patch.object(Alarms, "check", return_value=spike):
        train(recipe, str(tmp_path / "run"), "--grpo.iterations=5")
    out = capfd.readouterr().out
    assert "no rollback after iteration 1: no checkpoint has been evaluated yet" in out
    assert out.count("rollback 1 of 1 after iteration 3") == 1
    assert "no rollback after iteration 4: all of operations.rollbacks = 1 have been used" in out
    assert "rollback 2" not in out
    platform.destroy_distributed()


def test_alarms_alone_change_nothing_where_rollbacks_are_off(recipe, tmp_path, capfd):
    lost = {"collapse": "the reward has fallen"}
    with mock.patch.object(Alarms, "check", return_value=lost):
        train(recipe, str(tmp_path / "run"), "--operations.rollbacks=0", "--grpo.iterations=3")
    out = capfd.readouterr().out
    assert "iteration 3: the reward has fallen" in out and "rollback 1" not in out
    assert all("rollbacks" not in row for row in tiny.metrics_rows(tmp_path / "run"))
    platform.destroy_distributed()


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"checkpoint": {"interval": 0}}, ["checkpoint.interval = 0", "1 or more"]),
        ({"evaluation": {"interval": 0}}, ["evaluation.interval = 0", "1 or more"]),
        ({"evaluation": {"interval": 3}}, ["first meet after iteration 12 of 12", "equal"]),
        ({"operations": {"rollback_lr_factor": 0.0}}, ["rollback_lr_factor = 0.0", "above 0"]),
        ({"operations": {"rollback_lr_factor": 2.0}}, ["rollback_lr_factor = 2.0", "at most 1"]),
    ],
)
def test_settings_with_nothing_to_go_back_to_are_refused(sections, parts):
    good = {
        "grpo": {"iterations": 12},
        "checkpoint": {"interval": 4},
        "evaluation": {"interval": 2},
        "operations": {"rollbacks": 2},
    }
    config = tiny.tiny_config("prompts.txt", **good)
    check_training(config)
    with pytest.raises(ValueError) as refused:
        check_training(tiny.tiny_config("prompts.txt", **tiny.merged(good, sections)))
    assert all(part in str(refused.value) for part in parts), refused.value
