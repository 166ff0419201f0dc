# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""In which order each stage of a pipeline runs its forwards and backwards.

An item is step `t` of trajectory `m`; a trajectory stands for all that runs in one forward. Items
go through the stages t-major: every trajectory's step before anybody's next one. In a ring the last
stage turns the velocity of an item into the latents of the next step and hands them to the first
stage, so that with as many trajectories as stages the pipeline is filled once, not once a step.

A backward of a graph is *released* by the item whose forward completes its window: its own, or the
window's last step (jagg). The last stage runs it right after that forward, and stage `s` after
`P - 1 - s` further ones, when its gradient has come down: one forward, one backward. Of windows of
three steps or more only the two ends are differentiated.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Window = tuple[int, ...]
"""Consecutive trained steps that share their backwards; one step is the rule."""

Windows = Sequence[Sequence[Window]]
"""The windows of each trajectory, in order."""

Schedule = Literal["rollout", "replay", "retain", "reweight"]
SCHEDULES: tuple[Schedule, ...] = ("rollout", "replay", "retain", "reweight")


class Item(NamedTuple):
    """A step of a trajectory."""

    step: int
    trajectory: int

    def __str__(self) -> str:
        return f"step {self.step} of trajectory {self.trajectory}"


@dataclass(frozen=True)
class Operation:
    """A forward or a backward of one item on one stage."""

    kind: Literal["forward", "backward"]
    item: Item
    keeps: bool = False
    """The forward's graph is kept for a backward."""

    def __str__(self) -> str:
        return f"the {self.kind} of {self.item}"


Program = tuple[Operation, ...]
"""What one stage does, in order."""


@dataclass(frozen=True)
class Phase:
    """Programs of all stages that run without waiting for anything from outside."""

    programs: tuple[Program, ...]
    ring: bool = False
    """The first stage gets the latents of a step from the last stage, but for the first step."""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.programs)

    def renumbered(self, trajectories: Sequence[int]) -> "Phase":
        """The same phase on trajectories of other numbers."""

        def renumber(operation: Operation) -> Operation:
            item = operation.item
            return replace(operation, item=item._replace(trajectory=trajectories[item.trajectory]))

        programs = tuple(tuple(map(renumber, program)) for program in self.programs)
        return replace(self, programs=programs)


def phases(schedule: Schedule, stages: int, steps: int, windows: Windows) -> tuple[Phase, ...]:
    """The phases of an update on `len(windows)` trajectories of `steps` steps.

    Between two phases the rewards are computed. A `rollout` alone trains nothing.
    """
    if schedule == "reweight":
        return (_reweight(stages, steps, windows),)
    kept = _ends(windows) if schedule == "retain" else []
    rollout = _ring(stages, steps, len(windows), dict.fromkeys(kept, ()))
    if schedule == "replay":
        return rollout, replay_phase(stages, windows)
    return (rollout, retained_phase(stages, windows)) if kept else (rollout,)


def same_windows(trajectories: int, steps: Sequence[int], size: int = 1) -> Windows:
    """Windows of `size` consecutive entries of `steps`, the same for all trajectories."""
    own = [tuple(steps[i : i + size]) for i in range(0, len(steps), size)]
    return [own] * trajectories


def ends_of(window: Window) -> tuple[int, ...]:
    """The first and the last step, or the only one."""
    return (window[0], window[-1]) if len(window) > 1 else window


def most_kept(program: Program, kept: int = 0) -> int:
    """Most graphs that a stage holds at once, `kept` of them from before."""
    most = kept
    for operation in program:
        if operation.kind == "backward":
            kept -= 1
        else:
            kept += operation.keeps
        most = max(most, kept)
    return most


def graphs_in_flight(
    schedule: Schedule, stages: int, stage: int, trajectories: int, trained: int, window: int = 1
) -> int:
    """Most graphs on a stage, as a formula, where all trajectories train the same windows.

    `trained` is T, consecutive steps in windows of `window`. With windows of two steps or more
    reweight has one from as many trajectories as stages on.
    """
    lag = stages - 1 - stage
    full, rest = divmod(trained, window)
    ends = trajectories * (full * min(window, 2) + min(rest, 2))
    if schedule == "rollout":
        return 0
    if schedule == "retain":
        return ends
    if window == 1:
        return min(lag + 1, ends)
    if schedule == "replay":
        return min(lag + 2, ends)
    assert trajectories >= stages, "no formula for windows with fewer trajectories than stages"
    return min(trajectories + lag + 1, ends)


def _items(steps: int, trajectories: int) -> list[Item]:
    return [Item(t, m) for t in range(steps) for m in range(trajectories)]


def _ends(windows: Windows) -> list[Item]:
    """What is differentiated, t-major."""
    return sorted(
        Item(step, m) for m, own in enumerate(windows) for window in own for step in ends_of(window)
    )


def _ring(
    stages: int, steps: int, trajectories: int, released: Mapping[Item, Sequence[Item]]
) -> Phase:
    forwards = _items(steps, trajectories)
    return Phase(_interleaved(stages, forwards, released), ring=True)


def _reweight(stages: int, steps: int, windows: Windows) -> Phase:
    """One ring in which each window's backwards, the last step's first, follow at once."""
    released: dict[Item, list[Item]] = {}
    for m, own in enumerate(windows):
        for window in own:
            ends = [Item(step, m) for step in reversed(ends_of(window))]
            released[ends[0]] = ends
            # Kept, and released by the other end.
            released.setdefault(ends[-1], [])
    return _ring(stages, steps, len(windows), released)


def replay_phase(stages: int, windows: Windows) -> Phase:
    """The ends of all windows again, a window's next to each other: one forward, one backward.

    The newest window is the first one, as in the other schedules' backwards.
    """
    closing = sorted(
        ((window[-1], m, ends_of(window)) for m, own in enumerate(windows) for window in own),
        reverse=True,
    )
    forwards: list[Item] = []
    released: dict[Item, list[Item]] = {}
    for _, m, ends in closing:
        items = [Item(step, m) for step in ends]
        forwards += items
        released[items[0]] = []
        released[items[-1]] = items[::-1]
    return Phase(_interleaved(stages, forwards, released))


def retained_phase(stages: int, windows: Windows) -> Phase:
    """The backwards of retained graphs, the newest first."""
    program = tuple(Operation("backward", item) for item in reversed(_ends(windows)))
    return Phase((program,) * stages)


def _interleaved(
    stages: int, forwards: Sequence[Item], released: Mapping[Item, Sequence[Item]]
) -> tuple[Program, ...]:
    """Programs in which stage s runs what an item releases `P - 1 - s` items later.

    Graphs of the keys of `released` are kept. Of several backwards that an item releases one runs
    at once and the others after the next forwards: two in a row would leave the next stage idle.
    """
    queue: deque[Item] = deque()
    follow: list[list[Item]] = []
    for item in forwards:
        queue.extend(released.get(item, ()))
        follow.append([queue.popleft()] if queue else [])
    if follow:
        follow[-1] += queue
    programs = []
    for stage in range(stages):
        lag, program = stages - 1 - stage, []
        for n in range(len(forwards) + lag):
            if n < len(forwards):
                item = forwards[n]
                program.append(Operation("forward", item, keeps=item in released))
            if n >= lag:
                program += [Operation("backward", item) for item in follow[n - lag]]
        programs.append(tuple(program))
    return tuple(programs)
