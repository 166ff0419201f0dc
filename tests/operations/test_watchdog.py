# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A rank that is late is named, with its stack; the others are not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from megatron_leangrpo.operations.watchdog import Beat, Watchdog, describe, read_beats

# Generous for a busy machine: what is waited for comes after a tenth of a second.
PATIENCE_SECONDS = 30

_LATE_RANK = """
import sys, threading
from pathlib import Path
from megatron_leangrpo.operations.watchdog import Watchdog

def waits_for_a_file_system():
    threading.Event().wait(60)

dog = Watchdog(Path(sys.argv[1]), 1, 2, 0.1, print)
with dog:
    dog.beat("iteration 3, wave 1")
    waits_for_a_file_system()
"""


def wait_for(condition) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_late_rank_is_named_and_writes_its_stack_itself(tmp_path):
    late = subprocess.Popen([sys.executable, "-c", _LATE_RANK, str(tmp_path)])
    said: list[str] = []
    try:
        wait_for(lambda: [b.count for b in read_beats(tmp_path, 2) if b.rank == 1] == [2])
        with Watchdog(tmp_path, 0, 2, 0.1, said.append) as dog:
            dog.beat("iteration 3, wave 1")
            dog.beat("iteration 3, wave 2")
            wait_for(lambda: said)
        stacks = tmp_path / "rank_0001.stacks"
        wait_for(lambda: "waits_for_a_file_system" in stacks.read_text())
    finally:
        late.kill()
        late.wait()
    (line,) = said
    assert line.startswith("rank 1 on ") and "'iteration 3, wave 1'" in line
    assert str(stacks) in line


def test_a_delay_is_reported_once_and_the_next_one_again(tmp_path):
    said: list[str] = []
    with Watchdog(tmp_path, 0, 1, 0.05, said.append) as dog:
        wait_for(lambda: len(said) == 1)
        # Several limits later it has not been repeated.
        threading.Event().wait(0.2)
        assert len(said) == 1 and "no rank makes progress" in said[0]
        dog.beat("iteration 1, wave 1")
        wait_for(lambda: len(said) == 2)


def test_a_run_that_makes_progress_is_left_alone(tmp_path):
    said: list[str] = []
    with Watchdog(tmp_path, 0, 1, PATIENCE_SECONDS, said.append) as dog:
        for wave in range(3):
            dog.beat(f"wave {wave}")
        assert [beat.count for beat in read_beats(tmp_path, 1)] == [4]
    assert said == [] and not tmp_path.exists()


def test_ranks_without_a_heartbeat_and_spoilt_files_are_told_apart(tmp_path):
    (tmp_path / "rank_0000.json").write_text("{")
    assert read_beats(tmp_path, 2) == []
    beats = [Beat(rank, "node0", 3, "rollout", 0.0) for rank in range(3)]
    assert describe(beats, 4, 60.0, Path("x")).startswith("rank 3 has never reported")
