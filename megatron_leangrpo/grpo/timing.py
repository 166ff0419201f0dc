# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Seconds by phase of an iteration."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_leangrpo import platform

PHASES = ("rollout", "reward", "update")


class PhaseTimer:
    """Adds up the wall time of phases; the device is synchronised at their borders."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the context to phase `name`."""
        platform.synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            platform.synchronize()
            self.seconds[name] += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Return time_rollout, time_reward, time_update and time_total since construction."""
        times = {f"time_{name}": value for name, value in self.seconds.items()}
        return {**times, "time_total": time.perf_counter() - self._start}
