# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Ulysses in groups of heads, played task by task: who attends and who sends when."""

from collections.abc import Hashable

from megatron_leangrpo.overlap.cost_model import QKV_SHARE, Costs
from megatron_leangrpo.overlap.schedule import all_to_all_steps
from megatron_leangrpo.overlap.simulator import Simulation, Span


def simulate_attention(costs: Costs, groups: int) -> list[Span]:
    """An attention in `groups` of heads between two all-to-alls; a span's slice is its group.

    See `cost_model.attention_time` for what the costs mean here.
    """
    simulation = Simulation()
    for rank in range(costs.ranks):
        arrived = [
            _exchange(simulation, rank, "there", u, QKV_SHARE / groups, costs, [])
            for u in range(groups)
        ]
        for u in range(groups):
            attention = ("attention", rank, u)
            simulation.task(
                attention,
                rank=rank,
                kind="compute",
                slice_=u,
                duration=costs.compute_total / groups,
                after=arrived[u],
                on=("compute", rank),
            )
            _exchange(simulation, rank, "back", u, (1 - QKV_SHARE) / groups, costs, [attention])
    return simulation.run()


def _exchange(
    simulation: Simulation,
    rank: int,
    way: str,
    group: int,
    share: float,
    costs: Costs,
    after: list[Hashable],
) -> list[Hashable]:
    """Post a group's messages of one way; what arrives for it."""
    arriving: list[Hashable] = []
    for step in all_to_all_steps(rank, costs.ranks):
        if step.message is None:
            continue
        simulation.task(
            (way, rank, step.message.to, group),
            rank=rank,
            kind="send",
            slice_=group,
            duration=share * costs.hop + costs.latency,
            after=after,
            on=("out", rank),
        )
        arriving.append((way, step.message.source, rank, group))
        simulation.post(("in", rank), arriving[-1])
    return arriving
