# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Says which rank is late, where it is, and where each of its threads stands.

Every rank writes a heartbeat when it makes progress. Where none follows in time it writes the
stacks of its threads, from a thread of the interpreter that needs no lock, and rank 0 compares the
heartbeats: the ranks that wait in a collective have come further than the one they wait for.
"""

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_POLLS_A_LIMIT = 10


@dataclass(frozen=True)
class Beat:
    """The last sign of life of a rank."""

    rank: int
    host: str
    count: int
    """Beats so far; they follow one another in the same order on all ranks."""
    doing: str
    time: float


class Watchdog:
    """Heartbeats of a run in a folder that all ranks share; a context manager.

    Args:
        folder: one per run; made when it is not there.
        limit_seconds: a rank without progress for so long is late.
        report: called once for every delay, on rank 0.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        limit_seconds: float,
        report: Callable[[str], None],
    ) -> None:
        self.folder, self.rank, self.world_size = folder, rank, world_size
        self.limit_seconds, self._report = limit_seconds, report
        self._count, self._reported = 0, -1
        self.stacks = folder / f"rank_{rank:04}.stacks"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stacks = self.stacks.open("w")
        self.beat("starting")
        if self.rank == 0:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._stacks.close()
        if exception[0] is None:
            self._tidy()

    def beat(self, doing: str) -> None:
        """Say that this rank has come to the next piece of work."""
        self._count += 1
        faulthandler.dump_traceback_later(self.limit_seconds, file=self._stacks)
        self._write(Beat(self.rank, socket.gethostname(), self._count, doing, time.time()))

    def _tidy(self) -> None:
        """Leave nothing of a good run but stacks, where a rank was late."""
        self._heartbeat.unlink(missing_ok=True)
        if self.stacks.stat().st_size == 0:
            self.stacks.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # the last rank succeeds

    @property
    def _heartbeat(self) -> Path:
        return self.folder / f"rank_{self.rank:04}.json"

    def _write(self, beat: Beat) -> None:
        temporary = self._heartbeat.with_suffix(f".{os.getpid()}")
        # No fsync: a lost heartbeat costs nothing.
        temporary.write_text(json.dumps(asdict(beat)))
        temporary.replace(self._heartbeat)

    def _watch(self) -> None:
        while not self._ended.wait(self.limit_seconds / _POLLS_A_LIMIT):
            beats = read_beats(self.folder, self.world_size)
            newest = max((beat.time for beat in beats), default=time.time())
            progress = max((beat.count for beat in beats), default=0)
            if time.time() - newest > self.limit_seconds and progress != self._reported:
                self._reported = progress
                self._report(describe(beats, self.world_size, time.time(), self.folder))


def read_beats(folder: Path, world_size: int) -> list[Beat]:
    """The last heartbeat of every rank that has written one."""
    beats = []
    for rank in range(world_size):
        try:
            beats.append(Beat(**json.loads((folder / f"rank_{rank:04}.json").read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return beats


def describe(beats: Sequence[Beat], world_size: int, now: float, folder: Path) -> str:
    """One line on who is late: the ranks that have come least far, or all of them together."""
    silent = sorted(set(range(world_size)) - {beat.rank for beat in beats})
    if silent:
        ranks = ", ".join(map(str, silent[:8]))
        return f"rank {ranks} has never reported; the others wait (heartbeats in {folder})"
    least, most = min(b.count for b in beats), max(b.count for b in beats)
    late = [beat for beat in beats if beat.count == least]
    first = late[0]
    where = f"{first.doing!r} since {now - first.time:.0f} s"
    if least == most:
        return f"no rank makes progress: all are in {where}; stacks in {folder}/rank_*.stacks"
    ranks = ", ".join(f"{beat.rank} on {beat.host}" for beat in late[:8])
    more = f" and {len(late) - 8} more" if len(late) > 8 else ""
    return (
        f"rank {ranks}{more} is late: in {where}, while others wait for it; its stack is in "
        f"{folder}/rank_{first.rank:04}.stacks"
    )
