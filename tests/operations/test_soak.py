# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A soak in miniature: after a thousand iterations a run holds what it held after a few."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import psutil
import pytest

from megatron_leangrpo.grpo import commands
from megatron_leangrpo.grpo.trainer import Trainer
from tests.grpo import tiny

ITERATIONS = 1000
WARM = 300
"""Iterations after which caches, the allocator and libraries have what they want."""
EVERY = 50


def soak(folder: Path, iterations: int = ITERATIONS) -> dict[int, tuple[int, int, int]]:
    """Resident bytes, file descriptors and threads after every fiftieth iteration of a run."""
    config = tiny.tiny_config(
        tiny.write_prompts(folder),
        sampling={"height": 32, "width": 32, "num_steps": 2},
        grpo={
            "iterations": iterations,
            "prompts_per_iteration": 1,
            "group_size": 2,
            "micro_batch_size": 2,
        },
        optimizer={"ema_decay": 0.9},
        evaluation={"interval": 2 * EVERY, "num_steps": 1, "max_prompts": 1, "grid_images": 1},
        checkpoint={"interval": EVERY, "export_interval": -1, "keep": 1},
    )
    process, found = psutil.Process(), {}
    inner = Trainer._run_iteration

    def measured(self: Trainer, iteration: int) -> None:
        inner(self, iteration)
        if (iteration + 1) % EVERY == EVERY - 1:
            # The save has ended, and with it its thread and what it copied.
            self.saver.finish()
            # What has been given back and the C library still keeps for the next use is no growth.
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            found[iteration + 1] = (
                process.memory_info().rss,
                process.num_fds(),
                threading.active_count(),
            )

    # The command itself: `tiny.train_command` keeps every iteration's prompts, and its stand-in for
    # `save_curves` all rows that it was ever called with.
    with mock.patch.object(Trainer, "_run_iteration", measured):
        commands.train(tiny.write_recipe(config, folder), [f"--output={folder}/run"])
    return found


@pytest.fixture(scope="module")
def held(tmp_path_factory) -> list[list[int]]:
    """From a process of its own: others' caches grow in this one."""
    program = (
        "import json, sys; from pathlib import Path; from tests.operations.test_soak import soak; "
        "print('found', json.dumps(list(soak(Path(sys.argv[1])).values())))"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path_factory.mktemp("soak"))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    found = json.loads(outcome.stdout.splitlines()[-1].removeprefix("found "))
    assert len(found) == ITERATIONS // EVERY
    return found


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_file_descriptors_and_threads_do_not_grow(held):
    _, descriptors, threads = zip(*held[WARM // EVERY :], strict=True)
    # One may be open for a moment, when somebody writes.
    assert min(descriptors[-5:]) <= descriptors[0], held
    assert min(threads[-5:]) <= threads[0], held


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_memory_does_not_grow(held):
    memory, _, _ = zip(*held[WARM // EVERY :], strict=True)
    assert max(memory) <= 1.02 * memory[0], held
