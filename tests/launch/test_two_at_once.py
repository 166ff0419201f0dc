# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Two runs at once on one node, of different sizes, with torch's usual port taken (HB22)."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.grpo import tiny

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_runs_of_different_sizes_start_at_once_and_keep_to_themselves(tmp_path):
    config = tiny.tiny_config(
        tiny.write_prompts(tmp_path),
        model={"preset": "flux_tiny"},
        grpo={"iterations": 2},
        reward={"weights": {"jpeg_compressibility": 1.0}},
    )
    recipe = tiny.write_recipe(config, tmp_path)

    def start(ranks: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(REPOSITORY / "launch" / "torchrun.sh"), recipe, f"--output=run{ranks}"],
            env={**os.environ, "GPUS_PER_NODE": str(ranks), "PYTHON": sys.executable},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with socket.socket() as listener:
        with contextlib.suppress(OSError):  # taken already: as good
            listener.bind(("", 29500))
            listener.listen()
        running = {ranks: start(ranks) for ranks in (1, 2)}
        for ranks, process in running.items():
            out, error = process.communicate(timeout=400)
            assert (process.returncode, error) == (0, "")
            assert f"data parallel {ranks}" in out
    rewards = [[row["reward_mean"] for row in tiny.metrics_rows(tmp_path / f"run{ranks}")]
               for ranks in running]  # fmt: skip
    # The same samples in both layouts, up to the rounding of another order of sums.
    assert rewards[0] == pytest.approx(rewards[1], rel=1e-3)
