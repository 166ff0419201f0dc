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


_INSIDE_A_COLLECTIVE = """
import datetime, sys, threading
from pathlib import Path
import torch, torch.distributed as dist
from megatron_leangrpo.operations.watchdog import Watchdog

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
limit, timeout = map(float, sys.argv[3:])
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=timeout),
)
def waits_for_what_nobody_sends():
    # In C++ until its timeout: no line of Python runs on this thread.
    dist.recv(torch.zeros(1), src=0)
with Watchdog(folder, rank, 2, limit, lambda text: print(text, flush=True)) as dog:
    dog.beat("iteration 3, wave 1")
    dist.barrier()
    try:
        if rank == 1:
            waits_for_what_nobody_sends()
        dog.beat("iteration 3, wave 2")
        dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        print("ended:", str(error).splitlines()[0], flush=True)
"""


def test_a_rank_that_is_late_inside_a_collective_is_named_and_all_end_by_the_timeout(tmp_path):
    timeout = 8.0
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _INSIDE_A_COLLECTIVE, str(tmp_path), str(rank), "1", "8"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        wait_for(lambda: [beat.count for beat in read_beats(tmp_path, 2)] == [3, 2])
        began = time.monotonic()
        found = [rank.communicate(timeout=timeout + PATIENCE_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert time.monotonic() - began < timeout + PATIENCE_SECONDS
    (out, _), (late, _) = found
    lines = out.splitlines()
    assert [n for n in lines if n.startswith("rank 1 on ") and "'iteration 3, wave 1'" in n]
    assert lines[-1].startswith("ended: ") and late.splitlines()[-1].startswith("ended: ")
    assert "waits_for_what_nobody_sends" in (tmp_path / "rank_0001.stacks").read_text()
