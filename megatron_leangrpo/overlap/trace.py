# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What an overlapped operation did, in the order in which it did it; no clock."""

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["post", "wait", "product", "add"]


@dataclass(frozen=True)
class Event:
    """`step` and `part` say to which step of the schedule and which sub-slice it belongs."""

    kind: Kind
    step: int
    part: int


@dataclass
class Trace:
    """Events of one rank, and what it sent."""

    events: list[Event] = field(default_factory=list)
    messages: int = 0
    bytes_sent: int = 0

    def record(self, kind: Kind, step: int, part: int) -> None:
        """Append one event."""
        self.events.append(Event(kind, step, part))

    def sent(self, count: int) -> None:
        """Count one message of `count` bytes."""
        self.messages += 1
        self.bytes_sent += count

    def position(self, kind: Kind, step: int, part: int = 0) -> int:
        """Where the event stands; it must have happened once."""
        event = Event(kind, step, part)
        assert self.events.count(event) == 1, f"{event} happened {self.events.count(event)} times"
        return self.events.index(event)
