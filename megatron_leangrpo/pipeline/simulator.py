# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Plays the programs of all stages against each other: times, idle stages, and deadlocks.

A stage runs its operations in order. A message is put into the mailbox between two stages when its
operation ends; a stage whose mailbox is still full waits there, as `transport` does, with one
send a direction. It arrives a latency after it was put, and is taken when the operation that needs
it starts. New latents of a ring have a place for each trajectory, so that nobody waits to hand them
over.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_leangrpo.pipeline.order import Item, Operation, Phase, Program
from megatron_leangrpo.pipeline.times import StageTimes


class DeadlockError(RuntimeError):
    """Stages wait for each other, or for what nobody sends."""


@dataclass(frozen=True)
class Span:
    """An operation as it was played."""

    stage: int
    operation: Operation
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All operations of a phase with their times, by stage and in order."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """When the last stage is done."""
        return max((span.end for own in self.spans for span in own), default=0.0)

    @property
    def busy(self) -> float:
        """Time that all stages together compute."""
        return sum(span.end - span.start for own in self.spans for span in own)

    @property
    def bubble(self) -> float:
        """Share of the stages' time in which they wait."""
        return 1 - self.busy / (len(self.spans) * self.makespan) if self.makespan else 0.0


def simulate(phase: Phase, times: StageTimes, capacity: int = 1) -> Timeline:
    """Play a phase; `capacity` messages fit into a mailbox. Raises `DeadlockError`."""
    stages = phase.stages
    mailboxes = {
        (kind, s): _Mailbox(capacity) for kind in ("forward", "backward") for s in range(stages - 1)
    }
    latents = _Mailbox(None) if phase.ring else None
    players = [
        _Player(stage, program, times, mailboxes, latents, stages)
        for stage, program in enumerate(phase.programs)
    ]
    waiting = deque(players)
    queued = set(range(stages))
    while waiting:
        player = waiting.popleft()
        queued.discard(player.stage)
        if not player.play():
            continue
        # Whoever may have waited for what this one put or took.
        for stage in (player.stage - 1, player.stage + 1, 0):
            if 0 <= stage < stages and stage not in queued:
                queued.add(stage)
                waiting.append(players[stage])
    _check_all_ended(players)
    return Timeline(tuple(tuple(player.spans) for player in players))


def simulate_all(phases: Sequence[Phase], times: StageTimes) -> tuple[float, float]:
    """Time of phases one after the other, and the share in which stages wait."""
    timelines = [simulate(phase, times) for phase in phases]
    total = sum(timeline.makespan for timeline in timelines)
    busy = sum(timeline.busy for timeline in timelines)
    return total, 1 - busy / (phases[0].stages * total)


class _Mailbox:
    """Messages in the order in which they were put, each with its arrival."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._messages: deque[tuple[Item, float]] = deque()
        self._taken: list[float] = []
        """When each message was taken."""
        self._put = 0

    def has_room(self) -> bool:
        return self._capacity is None or len(self._messages) < self._capacity

    def room_since(self) -> float:
        """When the place of the next message became free."""
        before = 0 if self._capacity is None else self._put - self._capacity + 1
        return self._taken[before - 1] if before > 0 else 0.0

    def put(self, item: Item, arrival: float) -> None:
        self._messages.append((item, arrival))
        self._put += 1

    def arrival(self, item: Item) -> float | None:
        """When the message is there, if it is the next one."""
        if self._messages and self._messages[0][0] == item:
            return self._messages[0][1]
        return None

    def take(self, time: float) -> None:
        self._messages.popleft()
        self._taken.append(time)


@dataclass
class _Player:
    """One stage."""

    stage: int
    program: Program
    times: StageTimes
    mailboxes: dict[tuple[str, int], _Mailbox]
    latents: _Mailbox | None
    stages: int
    spans: list[Span] = field(default_factory=list)
    clock: float = 0.0
    sending: tuple[_Mailbox, Item] | None = None
    """A message that waits for room."""

    def __post_init__(self) -> None:
        self._first = {op.item.trajectory: op.item for op in reversed(self.program)}
        self._forwards = {op.item for op in self.program if op.kind == "forward"}
        self._done: set[Item] = set()

    def play(self) -> bool:
        """Go on as far as it goes; whether that was anywhere."""
        before = len(self.spans), self.sending
        while self._put() and len(self.spans) < len(self.program) and self._run():
            pass
        return (len(self.spans), self.sending) != before

    def _put(self) -> bool:
        """Get rid of the last operation's message; False while its mailbox is full."""
        if self.sending is None:
            return True
        mailbox, item = self.sending
        if not mailbox.has_room():
            return False
        self.clock = max(self.clock, mailbox.room_since())
        mailbox.put(item, self.clock + self.times.latency)
        self.sending = None
        return True

    def _run(self) -> bool:
        operation = self.program[len(self.spans)]
        source = self._source(operation)
        arrival = self._arrival(operation, source)
        if arrival is None:
            return False
        start = max(self.clock, arrival)
        if source is not None:
            source.take(start)
        kinds = {"forward": self.times.forward, "backward": self.times.backward}
        self.clock = start + kinds[operation.kind][self.stage]
        self.spans.append(Span(self.stage, operation, start, self.clock))
        if operation.kind == "forward":
            self._done.add(operation.item)
        self.sending = self._target(operation)
        return True

    def _arrival(self, operation: Operation, source: _Mailbox | None) -> float | None:
        item = operation.item
        if operation.kind == "backward" and item in self._forwards - self._done:
            return None
        return 0.0 if source is None else source.arrival(item)

    def _source(self, operation: Operation) -> _Mailbox | None:
        if operation.kind == "backward":
            return self.mailboxes.get(("backward", self.stage))
        if self.stage > 0:
            return self.mailboxes["forward", self.stage - 1]
        begins = self._first[operation.item.trajectory] == operation.item
        return None if begins else self.latents

    def _target(self, operation: Operation) -> tuple[_Mailbox, Item] | None:
        item = operation.item
        if operation.kind == "backward":
            mailbox = self.mailboxes.get(("backward", self.stage - 1))
        elif self.stage < self.stages - 1:
            mailbox = self.mailboxes["forward", self.stage]
        else:
            item = item._replace(step=item.step + 1)
            mailbox = self.latents if item in self._forwards else None
        return None if mailbox is None else (mailbox, item)

    def waits(self) -> str | None:
        """What it waits for, in words."""
        if self.sending is not None and not self._put():
            last = self.spans[-1].operation
            return f"stage {self.stage} cannot hand over the result of {last}"
        if len(self.spans) < len(self.program):
            return f"stage {self.stage} waits before {self.program[len(self.spans)]}"
        return None


def _check_all_ended(players: Sequence[_Player]) -> None:
    stuck = [text for player in players if (text := player.waits()) is not None]
    if stuck:
        raise DeadlockError(f"deadlock: {'; '.join(stuck)}")
