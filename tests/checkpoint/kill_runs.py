# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Runs a recipe, kills it at random moments, resumes it, until it has finished.

    python -m tests.checkpoint.kill_runs RECIPE RUN KILLS

Each attempt is a fork of this process, which has imported everything and started nothing.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from megatron_leangrpo.errors import run_command
from megatron_leangrpo.grpo import commands, dry_run, experiment, run_report, trainer  # noqa: F401
from tests.grpo import tiny  # noqa: F401


def attempt(recipe: str, run: str) -> int:
    """Start or continue the run in a process of its own; returns its id."""
    pid = os.fork()
    if pid == 0:
        os._exit(
            run_command(
                lambda: commands.train(recipe, [f"--output={run}", "--checkpoint.resume=auto"])
            )
        )
    return pid


def has_ended(pid: int) -> bool:
    """Whether a process is gone; raises where it failed by itself."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended and status:
        raise RuntimeError(f"an attempt ended with status {status}")
    return ended != 0


def kill_somewhere(pid: int, run: Path, rng: random.Random) -> bool:
    """Kill an attempt during a save, or a random moment after it made progress.

    Returns False where it ended before.
    """
    metrics = run / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    waits_for_save = rng.random() < 0.5
    while True:
        if has_ended(pid):
            return False
        if waits_for_save and list(run.glob("checkpoints/.step_*.tmp")):
            break
        if not waits_for_save and metrics.exists() and metrics.stat().st_size != before:
            break
        time.sleep(0.001)
    time.sleep(rng.random() * (0.02 if waits_for_save else 0.3))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def main() -> None:
    """Kill as often as asked, then let the run finish."""
    recipe, run, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    rng, done = random.Random(0), 0
    while done < kills:
        pid = attempt(recipe, str(run))
        if not kill_somewhere(pid, run, rng):
            break
        done += 1
    pid = attempt(recipe, str(run))
    while not has_ended(pid):
        time.sleep(0.05)
    print(f"killed {done} times")


if __name__ == "__main__":
    main()
