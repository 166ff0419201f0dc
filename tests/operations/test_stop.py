# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""SIGTERM on one rank stops all of them at the same place."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_leangrpo import platform
from megatron_leangrpo.operations.stop import StopRequested, StopSignal


@pytest.fixture(autouse=True)
def handler():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def _steps_until_stopped(signalled: int, step: int) -> int:
    platform.initialize_distributed()
    stop, before = StopSignal(), signal.getsignal(signal.SIGTERM)
    stop.install()
    try:
        for done in range(10):
            if platform.rank() == signalled and done == step:
                os.kill(os.getpid(), signal.SIGTERM)
            stop.check()
    except StopRequested:
        return done
    finally:
        signal.signal(signal.SIGTERM, before)
    return -1


def test_all_ranks_stop_at_the_same_check(run_ranks):
    assert run_ranks(2, _steps_until_stopped, 1, 4) == [4, 4]


def test_without_a_signal_nothing_happens_and_a_second_one_changes_nothing():
    stop = StopSignal()
    stop.check()
    stop.install()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.received
    with pytest.raises(StopRequested):
        stop.check()
