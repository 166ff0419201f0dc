# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""How a launch ends: stopped ranks take their time, bad input is not tried again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).parents[2] / "launch" / "run_ranks.py"

SAVING = """
import os, signal, sys, time
from pathlib import Path
folder, stopped = Path(sys.argv[1]), []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
(folder / f"ready{os.environ['RANK']}").touch()
while not stopped:
    time.sleep(0.01)
# A save that lasts until somebody allows it to end.
(folder / f"saving{os.environ['RANK']}").touch()
while not (folder / "saved").exists():
    time.sleep(0.01)
"""

FAILING = """
import os, sys
with open(sys.argv[1], "a") as attempts:
    attempts.write(os.environ["TORCHELASTIC_RESTART_COUNT"])
sys.exit(int(sys.argv[2]))
"""


def launch(script: Path, *arguments: str, restarts: int = 0, ranks: int = 1, **settings: str):
    return subprocess.Popen(
        [sys.executable, LAUNCHER, "--standalone", "--nproc-per-node", str(ranks),
         "--max-restarts", str(restarts), script, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def wait_for(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


STATUS = {"LEANGRPO_STOPPED_STATUS": "75"}


@pytest.mark.parametrize(
    ("settings", "status"), [({}, 0), pytest.param(STATUS, 75, marks=pytest.mark.slow)]
)
def test_stopped_ranks_save_as_long_as_it_takes(tmp_path, settings, status):
    script = tmp_path / "saving.py"
    script.write_text(SAVING)
    # What torchrun itself would grant is nothing, instead of 30 seconds.
    limit = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "0"}
    process = launch(script, str(tmp_path), ranks=2, restarts=3, **limit, **settings)
    for rank in range(2):
        wait_for(tmp_path / f"ready{rank}", process)
    process.send_signal(signal.SIGTERM)
    for rank in range(2):
        wait_for(tmp_path / f"saving{rank}", process)
    (tmp_path / "saved").touch()
    assert process.communicate(timeout=60) == (None, "")
    assert process.returncode == status


@pytest.mark.parametrize(
    ("settings", "status"), [(STATUS, 75), pytest.param({}, 143, marks=pytest.mark.slow)]
)
def test_ranks_that_had_nothing_to_save_are_not_started_again(tmp_path, settings, status):
    script = tmp_path / "starting.py"
    starting = SAVING.replace("signal.signal(", "(lambda *_: None)(")
    assert starting != SAVING
    script.write_text(starting)
    process = launch(script, str(tmp_path), restarts=3, **settings)
    wait_for(tmp_path / "ready0", process)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == (None, "")
    assert process.returncode == status


@pytest.mark.parametrize(
    ("status", "attempts"), [(2, "0"), pytest.param(1, "012", marks=pytest.mark.slow)]
)
def test_only_failures_are_tried_again_and_not_bad_input(tmp_path, status, attempts):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    process = launch(script, str(tmp_path / "attempts"), str(status), restarts=2)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == status
    assert (tmp_path / "attempts").read_text() == attempts
