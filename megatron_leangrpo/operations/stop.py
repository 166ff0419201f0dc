# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""SIGTERM as a request: the run saves at the last whole iteration and ends with status 0."""

import contextlib
import signal
from types import FrameType

from megatron_leangrpo import platform


class StopRequested(Exception):
    """Raised on all ranks at once where one of them has been asked to stop."""


class StopSignal:
    """Remembers SIGTERM until the ranks can act on it together.

    Schedulers signal launchers, ranks, or everything in a container, at different moments; a second
    signal changes nothing.
    """

    def __init__(self) -> None:
        self.received = False

    def install(self) -> None:
        """Take SIGTERM over; without effect outside the main thread."""
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, self._remember)

    def check(self) -> None:
        """Raise `StopRequested` on every rank where any has received the signal (a collective)."""
        if platform.smallest_over_ranks(-int(self.received)) < 0:
            raise StopRequested

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = True
