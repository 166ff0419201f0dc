# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""SIGTERM in the middle of a run (HB16): it saves the last whole iteration and ends with 0."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.store import checkpoints, newest_valid, step_folder
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


@pytest.mark.slow
def test_the_launcher_alone_is_signalled_and_leaves_a_whole_checkpoint_and_no_process(tmp_path):
    """As a scheduler does; two ranks under launch/torchrun.sh."""
    config = tiny.tiny_config(
        tiny.write_prompts(tmp_path),
        model={"preset": "flux_tiny"},
        grpo={"iterations": 1000, "micro_batch_size": 2},
        reward={"weights": {"jpeg_compressibility": 1.0}},
        evaluation={"num_steps": 1, "max_prompts": 2},
        checkpoint={"interval": 0},
    )
    script = Path(__file__).parents[2] / "launch" / "torchrun.sh"
    run = tmp_path / "run"
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(
            ["bash", str(script), tiny.write_recipe(config, tmp_path), f"--output={run}"],
            env={**os.environ, "GPUS_PER_NODE": "2", "PYTHON": sys.executable},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 400
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
        assert launcher.poll() is None and time.monotonic() < deadline, log_of(tmp_path)
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=400) == 0, log_of(tmp_path)
    assert "stopped by SIGTERM after iteration" in log_of(tmp_path)
    with pytest.raises(ProcessLookupError):
        os.killpg(launcher.pid, 0)
    found = newest_valid(run / "checkpoints")
    assert found.skipped == [] and found.checkpoint == step_folder(
        run / "checkpoints", len(comparable_rows(run))
    )
    for rank in range(2):
        events = (run / "logs" / f"rank_0000{rank}.jsonl").read_text().splitlines()
        assert json.loads(events[-1])["event"] == "stopped"


def log_of(folder: Path) -> str:
    return (folder / "log").read_text()[-4000:]
