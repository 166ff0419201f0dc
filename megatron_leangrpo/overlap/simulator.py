# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A discrete-event simulation of a layer and its collective: who computes and who sends when.

A task occupies one or two resources (a rank's products, its additions, the two halves of its link),
and every resource serves its tasks in the order in which the rank's program posts them, as CUDA
streams and NCCL communicators do. A task starts when what it depends on has ended and its resources
have served all that was posted before it. Orders that wait for each other are a deadlock.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from megatron_leangrpo.overlap.cost_model import Collective, Costs, Flash
from megatron_leangrpo.overlap.schedule import (
    Step,
    all_gather_steps,
    reduce_scatter_steps,
)

Kind = Literal["compute", "add", "send", "collective"]


class DeadlockError(RuntimeError):
    """Tasks wait for each other, or for a message that is never sent."""


@dataclass(frozen=True)
class Span:
    """A task as it was played."""

    rank: int
    """The rank that computes or sends."""
    kind: Kind
    slice: int
    start: float
    end: float


@dataclass(frozen=True)
class _Task:
    rank: int
    kind: Kind
    slice: int
    duration: float
    after: tuple[Hashable, ...]


class Simulation:
    """Tasks by key, and the order in which each resource serves them."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, _Task] = {}
        self._queues: dict[Hashable, list[Hashable]] = defaultdict(list)

    def task(
        self,
        key: Hashable,
        *,
        rank: int,
        kind: Kind,
        slice_: int,
        duration: float,
        after: Sequence[Hashable] = (),
        on: Hashable | None = None,
    ) -> None:
        """Add a task; `on` is the resource it is posted to now."""
        assert key not in self._tasks, f"{key} is posted twice"
        self._tasks[key] = _Task(rank, kind, slice_, duration, tuple(after))
        if on is not None:
            self.post(on, key)

    def post(self, resource: Hashable, key: Hashable) -> None:
        """Let a resource serve a task after all that was posted to it before."""
        self._queues[resource].append(key)

    def run(self) -> list[Span]:
        """Every task with its times, in order of start. Raises `DeadlockError`."""
        waits: dict[Hashable, set[Hashable]] = {k: set(t.after) for k, t in self._tasks.items()}
        for queue in self._queues.values():
            for before, key in pairwise(queue):
                waits.setdefault(key, set()).add(before)
            waits.setdefault(queue[0], set())
        followers: dict[Hashable, list[Hashable]] = defaultdict(list)
        for key, others in waits.items():
            for other in others:
                followers[other].append(key)
        missing = {key: len(others) for key, others in waits.items()}
        # Something that only one side posts, as a receive without its send, never ends.
        ready = [key for key, count in missing.items() if count == 0 and key in self._tasks]
        end: dict[Hashable, float] = {}
        spans = []
        while ready:
            key = ready.pop()
            task = self._tasks[key]
            start = max((end[other] for other in waits[key]), default=0.0)
            end[key] = start + task.duration
            spans.append(Span(task.rank, task.kind, task.slice, start, end[key]))
            for follower in followers[key]:
                missing[follower] -= 1
                if missing[follower] == 0 and follower in self._tasks:
                    ready.append(follower)
        self._check_all_ended(waits, end)
        return sorted(spans, key=lambda span: (span.start, span.rank, span.kind))

    def _check_all_ended(
        self, waits: dict[Hashable, set[Hashable]], end: dict[Hashable, float]
    ) -> None:
        stuck = [key for key in waits if key not in end]
        if stuck:
            never = [key for key in stuck if key not in self._tasks]
            example = never[0] if never else stuck[0]
            why = "is never sent" if never else "waits for itself"
            raise DeadlockError(
                f"deadlock: {len(stuck)} of {len(waits)} tasks never end; {example} {why}"
            )


def end_of(spans: Sequence[Span]) -> float:
    """When the last task ends."""
    return max(span.end for span in spans)


def simulate_flash(
    costs: Costs,
    collective: Collective,
    flash: Flash,
    steps: Sequence[Sequence[Step]] | None = None,
) -> list[Span]:
    """The overlapped schedule; `steps` replaces every rank's own, to try a wrong one."""
    ranks = range(costs.ranks)
    build = all_gather_steps if collective == "all-gather" else reduce_scatter_steps
    steps = steps or [build(rank, costs.ranks, flash.pattern) for rank in ranks]
    simulation = Simulation()
    for rank in ranks:
        if collective == "all-gather":
            _post_all_gather(simulation, rank, steps[rank], costs, flash)
        elif flash.pattern == "ring":
            _post_ring_reduce_scatter(simulation, rank, steps[rank], costs, flash)
        else:
            _post_direct_reduce_scatter(simulation, rank, steps[rank], costs, flash)
    return simulation.run()


class _Program:
    """What one rank posts; `u` counts sub-slices and `i` steps."""

    def __init__(self, simulation: Simulation, rank: int, costs: Costs, flash: Flash) -> None:
        self._simulation, self.rank = simulation, rank
        self._costs, self._parts = costs, flash.sub_slices

    def compute(self, step: Step, u: int, after: Sequence[Hashable] = ()) -> Hashable:
        return self._own("compute", step.compute, u, self._costs.compute, after)

    def add(self, slice_: int, u: int, after: Sequence[Hashable]) -> Hashable:
        return self._own("add", slice_, u, self._costs.add, after)

    def _own(
        self, kind: Kind, slice_: int, u: int, duration: float, after: Sequence[Hashable]
    ) -> Hashable:
        # A direct sum adds to one slice several times: the tasks it waits for tell them apart.
        key = (kind, self.rank, slice_, u, tuple(after) if kind == "add" else None)
        self._simulation.task(
            key,
            rank=self.rank,
            kind=kind,
            slice_=slice_,
            duration=duration / self._parts,
            after=after,
            on=(kind, self.rank),
        )
        return key

    def exchange(self, step: Step, u: int, after: Sequence[Hashable] = ()) -> Hashable:
        """Post both halves of a step's message; the key of what arrives."""
        message = step.message
        assert message is not None
        self._simulation.task(
            ("send", self.rank, message.to, message.sends, u),
            rank=self.rank,
            kind="send",
            slice_=message.sends,
            duration=self._costs.hop / self._parts + self._costs.latency,
            after=after,
            on=("out", self.rank),
        )
        arriving = ("send", message.source, self.rank, message.receives, u)
        self._simulation.post(("in", self.rank), arriving)
        return arriving


def _post_all_gather(
    simulation: Simulation, rank: int, steps: Sequence[Step], costs: Costs, flash: Flash
) -> None:
    program = _Program(simulation, rank, costs, flash)
    arrived: dict[int, Hashable] = {}
    for step in steps:
        for u in range(flash.sub_slices):
            present = [arrived[u]] if u in arrived else []
            if step.message:
                # A ring passes on what arrived; a direct message is always the rank's own slice.
                needs = present if flash.pattern == "ring" else []
                arrived[u] = program.exchange(step, u, needs)
            program.compute(step, u, present)


def _post_ring_reduce_scatter(
    simulation: Simulation, rank: int, steps: Sequence[Step], costs: Costs, flash: Flash
) -> None:
    program = _Program(simulation, rank, costs, flash)
    total: dict[int, Hashable] = {}
    for step in steps:
        for u in range(flash.sub_slices):
            arriving = [program.exchange(step, u, [total[u]])] if step.message else []
            if flash.in_product:
                total[u] = program.compute(step, u, arriving)
            else:
                total[u] = product = program.compute(step, u)
                if arriving:
                    total[u] = program.add(step.compute, u, [product, *arriving])


def _post_direct_reduce_scatter(
    simulation: Simulation, rank: int, steps: Sequence[Step], costs: Costs, flash: Flash
) -> None:
    program = _Program(simulation, rank, costs, flash)
    arriving: dict[int, Hashable] = {}
    total: dict[int, Hashable] = {}
    for step in steps:
        for u in range(flash.sub_slices):
            product = program.compute(step, u)
            if u in arriving:
                total[u] = (
                    program.add(rank, u, [total[u], arriving[u]]) if u in total else arriving[u]
                )
            if step.message:
                arriving[u] = program.exchange(step, u, [product])
            elif u in total:
                program.add(rank, u, [total[u], product])


def simulate_none(costs: Costs, collective: Collective) -> list[Span]:
    """The product and the collective one after the other."""
    return simulate_slicing(costs, collective, chunks=1)


def simulate_slicing(
    costs: Costs, collective: Collective, chunks: int, chunk_cost: float = 0.0
) -> list[Span]:
    """`chunks` collectives, each beside the product of another chunk, as Megatron's kin do."""
    simulation = Simulation()
    ranks = range(costs.ranks)
    first = collective == "all-gather"
    for chunk in range(chunks):
        products = [("compute", rank, chunk) for rank in ranks]
        for rank in ranks:
            simulation.task(
                products[rank],
                rank=rank,
                kind="compute",
                slice_=chunk,
                duration=costs.compute_total / chunks,
                after=[("collective", chunk, rank)] if first and costs.ranks > 1 else [],
                on=("compute", rank),
            )
        for rank in ranks if costs.ranks > 1 else ():
            simulation.task(
                ("collective", chunk, rank),
                rank=rank,
                kind="collective",
                slice_=chunk,
                duration=costs.collective_total / chunks + chunk_cost,
                # A reduction begins when every rank has its product.
                after=[] if first else products,
                on=("collective", rank),
            )
    return simulation.run()
