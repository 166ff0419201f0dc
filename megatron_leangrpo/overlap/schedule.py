# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which slice a rank computes and which one it sends, step by step; pure functions.

The tokens are cut into one slice per rank, and slice `j` belongs to rank `j`. An all-gather starts
with the rank's own slice, so its first product waits for nothing. A reduce-scatter and an
all-to-all end with it, so nothing is sent after the last product.

A `ring` talks to neighbours only and adds on the way: it fits PCIe, several nodes, physical rings.
`direct` sends every slice straight to the rank that needs it: no chain of additions, so they can be
in float32, but every pair of ranks needs its bandwidth.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

Pattern = Literal["ring", "direct"]
PATTERNS: tuple[str, ...] = get_args(Pattern)


@dataclass(frozen=True)
class Message:
    """One send and one receive, posted together."""

    to: int
    sends: int
    """The slice that is sent."""
    source: int
    receives: int
    """The slice that is received."""


@dataclass(frozen=True)
class Step:
    """One product, and the message that travels beside it."""

    compute: int
    """The slice whose product is computed."""
    message: Message | None


def all_gather_order(rank: int, size: int) -> list[int]:
    """The slices in the order in which a rank has them: its own first."""
    return [(rank - i) % size for i in range(size)]


def ring_reduce_scatter_order(rank: int, size: int) -> list[int]:
    """The slices in the order in which a rank computes them in a ring: its own last."""
    return [(rank - 1 - i) % size for i in range(size)]


def direct_order(rank: int, size: int) -> list[int]:
    """The slices in the order in which a rank sends them to their owners: its own last."""
    return [(rank + 1 + i) % size for i in range(size)]


def all_gather_steps(rank: int, size: int, pattern: Pattern) -> list[Step]:
    """The steps of an all-gather; a message is posted before the product of its step.

    What step `i` computes for `i >= 1` was received by the message of step `i - 1`.
    """
    order = all_gather_order(rank, size)
    steps = []
    for i, compute in enumerate(order):
        message = None
        if i < size - 1:
            arriving = order[i + 1]
            if pattern == "ring":
                message = Message((rank + 1) % size, compute, (rank - 1) % size, arriving)
            else:
                message = Message((rank + 1 + i) % size, rank, arriving, arriving)
        steps.append(Step(compute, message))
    return steps


def reduce_scatter_steps(rank: int, size: int, pattern: Pattern) -> list[Step]:
    """The steps of a reduce-scatter.

    ring: the message of step `i >= 1` sends the running sum of step `i - 1` and receives the one
    that this step's product is added to, so slice `s` is summed in the order `s+1, s+2, ..., s`.
    direct: the message of step `i < size - 1` sends this step's product and receives a partial sum
    of the rank's own slice, which arrive in the order `rank-1, rank-2, ...`.
    """
    if pattern == "direct":
        return all_to_all_steps(rank, size)
    order = ring_reduce_scatter_order(rank, size)
    following, preceding = (rank + 1) % size, (rank - 1) % size
    return [
        Step(slice_, Message(following, order[i - 1], preceding, slice_) if i else None)
        for i, slice_ in enumerate(order)
    ]


def all_to_all_steps(rank: int, size: int) -> list[Step]:
    """The steps of an all-to-all; a message sends the product of its own step to its owner."""
    steps = []
    for i, compute in enumerate(direct_order(rank, size)):
        message = None
        if i < size - 1:
            message = Message(compute, compute, (rank - 1 - i) % size, rank)
        steps.append(Step(compute, message))
    return steps


def sub_slices(rows: int, count: int) -> list[tuple[int, int]]:
    """The bounds of at most `count` sub-slices, whose lengths differ by one row at most.

    Cutting unevenly costs no product of padding; a slice of fewer rows has fewer sub-slices.
    """
    count = max(1, min(count, rows))
    bounds = [rows * u // count for u in range(count + 1)]
    return list(pairwise(bounds))
