# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A link slower than the one at hand, in real or in virtual time, to see what overlapping hides."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron_leangrpo.overlap.schedule import Message
from megatron_leangrpo.overlap.transport import Pending, Transport


class Clock(Protocol):
    """What an emulated link and emulated products take their time from."""

    def now(self) -> float:
        """Seconds, on one scale for all ranks."""

    def wait_until(self, moment: float) -> None:
        """Return at `moment`, or at once if it has passed."""

    def spend(self, seconds: float) -> None:
        """Be busy for a while."""


class WallClock:
    """Real time; the monotonic clock is one for all processes of a machine."""

    def now(self) -> float:
        """Seconds since the machine started."""
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        """Sleep."""
        time.sleep(max(0.0, moment - time.monotonic()))

    def spend(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


class VirtualClock:
    """A rank's own time, which only what it spends and waits for moves."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds since the clock was made."""
        return self._now

    def wait_until(self, moment: float) -> None:
        """Move on to `moment`."""
        self._now = max(self._now, moment)

    def spend(self, seconds: float) -> None:
        """Move on by `seconds`."""
        self._now += seconds


class EmulatedLink:
    """A transport whose messages arrive as late as over a link of a given bandwidth.

    A rank's messages leave one after another; each carries the moment of its arrival, and the
    receiver waits for that moment.
    """

    def __init__(
        self,
        inner: Transport,
        bytes_per_second: float,
        latency_seconds: float,
        clock: Clock,
        sent: Callable[[int, float, float], None] | None = None,
    ) -> None:
        """`sent(slice, leaves, arrives)` is told of every message of this rank."""
        self.rank, self.size = inner.rank, inner.size
        self._inner, self._clock, self._sent = inner, clock, sent
        self._bandwidth, self._latency = bytes_per_second, latency_seconds
        self._free_at = 0.0

    def exchange(
        self, send: torch.Tensor, receive: torch.Tensor, message: Message, layer: str
    ) -> Pending:
        """Post the message and the moment at which it arrives."""
        leaves = max(self._clock.now(), self._free_at)
        self._free_at = leaves + self._latency + send.nbytes / self._bandwidth
        if self._sent is not None:
            self._sent(message.sends, leaves, self._free_at)
        moment = torch.tensor([self._free_at], dtype=torch.float64)
        arrives = torch.empty_like(moment)
        stamp = self._inner.exchange(moment, arrives, message, f"{layer} arrival")
        payload = self._inner.exchange(send, receive, message, layer)
        return _EmulatedPending(stamp, payload, arrives, self._clock)

    def check_agreement(self, layer: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """As the transport below."""
        self._inner.check_agreement(layer, shape, dtype)


class _EmulatedPending:
    def __init__(
        self, stamp: Pending, payload: Pending, arrives: torch.Tensor, clock: Clock
    ) -> None:
        self._stamp, self._payload, self._arrives, self._clock = stamp, payload, arrives, clock

    def wait(self) -> None:
        self._stamp.wait()
        self._payload.wait()
        self._clock.wait_until(self._arrives.item())
