# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A run that is killed twenty times ends like one that is not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.store import checkpoints, damage
from tests.checkpoint.test_resume import comparable_rows, tensors_of
from tests.grpo import tiny

ITERATIONS, KILLS = 30, 20


def _run(recipe: str, run: Path, kills: int) -> str:
    command = [sys.executable, "-m", "tests.checkpoint.kill_runs", recipe, str(run), str(kills)]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_leave_the_weights_metrics_and_pictures_of_an_undisturbed_run(tmp_path):
    config = tiny.tiny_config(
        tiny.write_prompts(tmp_path),
        sampling={"num_steps": 4},
        grpo={"iterations": ITERATIONS, "schedule": "jagg", "jagg_frac": 1.0, "group_size": 2},
        optimizer={"ema_decay": 0.9},
        checkpoint={"interval": 1, "keep": 1},
    )
    recipe = tiny.write_recipe(config, tmp_path)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    _run(recipe, straight, 0)
    found = re.search(r"killed (\d+) times", _run(recipe, killed, KILLS))
    # It may finish a few iterations at a time, but not before it was killed often.
    assert int(found[1]) >= KILLS // 2
    assert comparable_rows(killed) == comparable_rows(straight)
    assert [row["iteration"] for row in comparable_rows(killed)] == list(range(1, ITERATIONS + 1))
    assert max(number for number, _ in checkpoints(killed / "checkpoints")) == ITERATIONS
    for _, path in checkpoints(killed / "checkpoints"):
        assert damage(path) is None
    platform.initialize_distributed()
    own, expected = tensors_of(killed, ITERATIONS), tensors_of(straight, ITERATIONS)
    platform.destroy_distributed()
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], expected[name]) for name in expected)
    for picture in ("before", "after", "before_after"):
        pictures = [(run / "samples" / f"{picture}.png").read_bytes() for run in (killed, straight)]
        assert pictures[0] == pictures[1], picture
