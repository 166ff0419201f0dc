# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""SIGTERM in the middle of a run (HB16): it saves the last whole iteration and ends with 0."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.store import checkpoints
from tests.checkpoint.test_resume import comparable_rows, tensors_of
from tests.grpo import tiny


class SignalledReward(tiny.SmoothReward):
    """Sends SIGTERM to its own process at a call, as a scheduler does at some moment."""

    at: int | None = None
    calls = 0

    def __call__(self, images, prompts, metadata) -> torch.Tensor:
        SignalledReward.calls += 1
        if SignalledReward.calls == SignalledReward.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__call__(images, prompts, metadata)


REWARD = "--reward.weights={tests.launch.test_stopping:SignalledReward: 1.0}"


@pytest.fixture
def recipe(tmp_path) -> str:
    config = tiny.tiny_config(
        tiny.write_prompts(tmp_path),
        grpo={"iterations": 3, "micro_batch_size": 2},
        checkpoint={"interval": 0},
        optimizer={"lr": 1e-3, "ema_decay": 0.9, "ema_interval": 1},
        evaluation={"interval": 2},
    )
    return tiny.write_recipe(config, tmp_path)


def run(leangrpo, recipe: str, output: str, signalled_at: int | None = None, *more: str):
    SignalledReward.at, SignalledReward.calls = signalled_at, 0
    return leangrpo("train", recipe, REWARD, f"--output={output}", *more)


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param((7,), id="rollout"),
        # Evaluation, first and last wave, evaluation after the second iteration, the last one.
        pytest.param((1, 3, 5, 10, -1), id="elsewhere", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_continues_bit_for_bit(leangrpo, recipe, moments):
    assert run(leangrpo, recipe, "straight").status == 0
    calls = SignalledReward.calls
    for number, moment in enumerate(moments):
        at = moment % (calls + 1)
        folder = f"run{number}"
        stopped = run(leangrpo, recipe, folder, at)
        assert stopped.status == 0, stopped
        if at < calls - 1:
            assert "stopped by SIGTERM after iteration" in stopped.out
            finished = len(comparable_rows(Path(folder)))
            kept = [step for step, _ in checkpoints(Path(folder, "checkpoints"))]
            assert kept == [finished] * (finished > 0)
            assert run(leangrpo, recipe, folder, None, "--checkpoint.resume=auto").status == 0
        assert comparable_rows(Path(folder)) == comparable_rows(Path("straight"))
        platform.initialize_distributed()
        own, expected = tensors_of(Path(folder), 3), tensors_of(Path("straight"), 3)
        platform.destroy_distributed()
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[name], expected[name]) for name in expected)


def test_a_run_that_saves_nothing_says_so(leangrpo, recipe):
    outcome = run(leangrpo, recipe, "run", 4, "--checkpoint.interval=-1")
    assert outcome.status == 0
    assert "nothing was saved (checkpoint.interval = -1)" in outcome.out
