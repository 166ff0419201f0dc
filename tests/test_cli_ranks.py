# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""`leangrpo` on real ranks: one message of the rank that failed, its status, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.grpo import tiny

REPOSITORY = Path(__file__).parents[1]
LAUNCHER = REPOSITORY / "launch" / "run_ranks.py"


class FailsOnRankOne(tiny.SmoothReward):
    """Scores the first evaluation, then loses its server on one of the ranks."""

    calls = 0

    def __call__(self, images, prompts, metadata) -> torch.Tensor:
        FailsOnRankOne.calls += 1
        if self.calls > 1 and os.environ["RANK"] == "1":
            raise ConnectionError("the server is away")
        return super().__call__(images, prompts, metadata)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("recipe")
    config = tiny.tiny_config(
        tiny.write_prompts(folder),
        model={"preset": "flux_tiny"},
        grpo={"iterations": 100_000},
        evaluation={"max_prompts": 2},
    )
    return tiny.write_recipe(config, folder)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Two ranks in a process group of their own, as a terminal would have it."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    environment.pop("LEANGRPO_TRACEBACK", None)
    launch = [sys.executable, str(LAUNCHER), "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*launch, "-m", "megatron_leangrpo", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and messages; a run that hangs is ended."""
    try:
        _, error = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, error


def test_bad_input_is_named_once_and_two_runs_can_start_at_once(recipe, tmp_path):
    not_a_command = start(tmp_path, "trian", recipe)
    indivisible = start(tmp_path, "train", recipe, "--grpo.group_size=3", "--grpo.placement=local",
                        "--grpo.prompts_per_iteration=3")  # fmt: skip
    status, error = end(not_a_command)
    assert (status, error.count("\n")) == (2, 1), error
    assert error.startswith("leangrpo: error: ") and "'trian'" in error
    status, error = end(indivisible)
    assert (status, error.count("\n")) == (2, 1), error
    assert "2 data-parallel ranks" in error and "[2, 4]" in error
    assert list(tmp_path.iterdir()) == []


def test_a_failing_rank_ends_the_run_with_its_message_alone(recipe, tmp_path):
    reward = "--reward.weights={tests.test_cli_ranks:FailsOnRankOne: 1.0}"
    status, error = end(start(tmp_path, "train", recipe, reward, "--output=run"))
    assert (status, error.count("\n")) == (1, 1), error
    assert error.startswith("leangrpo: error on rank 1: reward 'tests.test_cli_ranks:Fails")
    assert "the server is away" in error
    assert (tmp_path / "run" / "config.yaml").is_file()


def test_control_c_in_the_middle_of_a_run_leaves_one_line_and_no_process(recipe, tmp_path):
    process = start(tmp_path, "train", recipe, "--output=run")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("iteration"):
            break
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    os.killpg(process.pid, signal.SIGINT)
    status, error = end(process)
    assert (status, error) == (130, "leangrpo: interrupted\n")
    assert [child for child in family if child.is_running()] == []
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["iteration"] for row in rows] == list(range(1, len(rows) + 1))
