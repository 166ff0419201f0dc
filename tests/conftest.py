# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Fixtures every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from megatron_leangrpo.reporting.quiet import quiet_libraries
from tests.distributed.launcher import RankLauncher

if TYPE_CHECKING:
    from tests.command_line import CommandLine

# Set before any test module imports torch: the ranks of a test share the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As the command line does before it imports anything heavy: libraries read this when imported.
quiet_libraries()


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RankLauncher]:
    """Run a function on real gloo ranks: `run_ranks(world_size, function, *args, **kwargs)`.

    Returns a list with every rank's return value, in rank order. `function` must be defined at the
    top level of a test module; its arguments and its results must pickle (tensors are fine).
    The ranks are processes started once per world size and reused, one thread each, already joined
    in a gloo world: call `platform.initialize_distributed(tensor_model_parallel_size)` first, as
    often as you like and with any size, and never `destroy_distributed()`. One rank alone runs in
    the test's own process.
    A rank that raises fails the test with its traceback; a hang ends after `timeout_seconds`
    (a keyword, 120 by default). After a failure the next call gets fresh processes.
    """
    launcher = RankLauncher()
    yield launcher
    launcher.close()


@pytest.fixture
def single_process() -> Iterator[None]:
    """Megatron's groups with this process alone in them, for tests that need no ranks."""
    from megatron_leangrpo import platform

    platform.initialize_distributed(tensor_model_parallel_size=1)
    yield
    platform.destroy_distributed()


@pytest.fixture
def leangrpo(capfd, monkeypatch, tmp_path) -> Iterator[CommandLine]:
    """Run `leangrpo` in this process, in an empty directory: `leangrpo("train", recipe)`."""
    from megatron_leangrpo import errors, platform
    from tests.command_line import CommandLine

    # A failing command would leave the process at once, to wait for no other rank.
    monkeypatch.setattr(errors, "_process_group_is_alive", lambda: False)
    monkeypatch.delenv(errors.TRACEBACK_VARIABLE, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield CommandLine(capfd)
    platform.destroy_distributed()
