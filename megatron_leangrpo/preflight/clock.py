# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""How far the nodes' clocks are apart, measured by messages between their ranks."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_leangrpo.preflight.result import Check

# Rendezvous takes a node for dead that was last seen 15 s ago by the clock of another one.
LARGEST_SKEW_SECONDS = 2.0
_EXCHANGES = 8


def measure_skews(ranks: Sequence[int], clock: Callable[[], float] = time.time) -> dict[int, float]:
    """Seconds by which the clocks of some ranks are ahead of rank 0's (a collective).

    Each rank asks rank 0 for its time; half of the shortest exchange is the travelling time.
    """
    mine, skews = dist.get_rank(), torch.zeros(dist.get_world_size(), dtype=torch.float64)
    for rank in ranks:
        if mine == rank:
            skews[rank] = _ask(clock)
        elif mine == 0:
            for _ in range(_EXCHANGES):
                dist.recv(torch.empty(1, dtype=torch.float64), rank)
                dist.send(torch.tensor([clock()], dtype=torch.float64), rank)
    dist.all_reduce(skews)
    return {rank: float(skews[rank]) for rank in ranks}


def _ask(clock: Callable[[], float]) -> float:
    answer, best = torch.empty(1, dtype=torch.float64), (float("inf"), 0.0)
    for _ in range(_EXCHANGES):
        begin, started = clock(), time.perf_counter()
        dist.send(torch.zeros(1, dtype=torch.float64), 0)
        dist.recv(answer, 0)
        took = time.perf_counter() - started
        best = min(best, (took, begin + took / 2 - float(answer)))
    return best[1]


def clock_check(skews: dict[int, float], hosts: Sequence[str]) -> Check:
    """The check of what was measured; `hosts` is by rank."""
    if not skews:
        return Check("clocks", True, "one node")
    worst = max(skews, key=lambda rank: abs(skews[rank]))
    text = f"{hosts[worst]} is {abs(skews[worst]):.3f} s " + (
        "ahead of" if skews[worst] > 0 else "behind"
    )
    good = abs(skews[worst]) <= LARGEST_SKEW_SECONDS
    advice = "" if good else f"; valid: {LARGEST_SKEW_SECONDS:g} s (is its NTP service running?)"
    return Check("clocks", good, f"{text} {hosts[0]}{advice}")
