# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Memory and seconds of a rank where the blocks are split over pipeline stages.

A stage is reckoned as a transformer of its blocks alone, with the embedders on the first stage and
the output on the last one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_leangrpo.pipeline.bubbles import waiting_in_rings
from megatron_leangrpo.pipeline.order import Schedule, Window, most_kept, phases
from megatron_leangrpo.pipeline.times import StageTimes
from megatron_leangrpo.planner.gpus import Gpu
from megatron_leangrpo.planner.kinds import boundary_bytes
from megatron_leangrpo.planner.memory import RankMemory, base_of, rank_memory, windows
from megatron_leangrpo.planner.seconds import IterationSeconds, iteration_seconds, pass_seconds
from megatron_leangrpo.planner.splitting import split_of, stage_works
from megatron_leangrpo.planner.workload import Batch, Ranks, Workload


@dataclass(frozen=True)
class StagePlan:
    """One stage of a layout."""

    blocks: int
    memory: RankMemory
    forward: float
    """Seconds of a wave's forward."""
    backward: float
    """Seconds of a wave's backward, recomputed forwards included."""


def trained_windows(work: Workload, schedule: str, wave_size: int) -> tuple[Window, ...]:
    """What a wave differentiates, the first steps; jagg's approximated windows evenly among them.

    jagg is reckoned past its first iteration.
    """
    steps = math.ceil(work.trained_steps_of(wave_size))
    count, size = windows(work) if schedule == "jagg" else (0, 1)
    if not count:
        return tuple((step,) for step in range(steps))
    found: list[Window] = []
    full, done = steps // size, 0
    for n in range(full):
        own = tuple(range(n * size, (n + 1) * size))
        is_one = (n + 1) * count // full > done
        done += is_one
        found += [own] if is_one else [(step,) for step in own]
    return (*found, *((step,) for step in range(full * size, steps)))


def stage_plans(
    work: Workload, batch: Batch, schedule: str, recompute: str, ranks: Ranks, gpu: Gpu
) -> tuple[StagePlan, ...]:
    """Bytes and seconds of every stage."""
    times = stage_times(work, batch, recompute, ranks, gpu)
    memories = stage_memories(work, batch, schedule, recompute, ranks)
    return tuple(
        StagePlan(sum(n for _, n in own.shape.blocks), memory, forward, backward)
        for own, memory, forward, backward in zip(
            stage_works(work, ranks), memories, times.forward, times.backward
        )
    )


def stage_memories(
    work: Workload, batch: Batch, schedule: str, recompute: str, ranks: Ranks
) -> list[RankMemory]:
    """Bytes on a rank of each stage."""
    inside = replace(ranks, pipeline=1)
    kept = [
        _kept(
            base_of(work, schedule),
            ranks.pipeline,
            batch.waves_in_flight,
            work.sampled_steps,
            trained_windows(work, name, batch.wave_size),
        )
        # The first iteration of jagg is exact.
        for name in dict.fromkeys((schedule, base_of(work, schedule)))
    ]
    messages = _messages(work, batch, ranks)
    return [
        replace(
            rank_memory(
                own, replace(batch, graphs_of_a_step=max(graphs)), schedule, recompute, inside
            ),
            messages=message,
        )
        for own, graphs, message in zip(stage_works(work, ranks), zip(*kept, strict=True), messages)
    ]


@lru_cache(maxsize=1024)
def _kept(
    schedule: Schedule, stages: int, trajectories: int, steps: int, own: tuple[Window, ...]
) -> tuple[int, ...]:
    """Most graphs that each stage holds, where not all of them wait for their rewards."""
    order = phases(schedule, stages, steps, [own] * trajectories)
    return tuple(most_kept(program) for program in order[-1].programs)


def _messages(work: Workload, batch: Batch, ranks: Ranks) -> Iterator[int]:
    """Bytes of the messages of each stage: to and from a neighbour one waits to be taken."""
    layout = work.layout(ranks, "none", batch.wave_size)
    kinds, begin, before = work.shape.kinds, 0, 0
    for count in split_of(work, ranks):
        begin += count
        is_last = begin == len(kinds)
        after = 0 if is_last else boundary_bytes(work.shape, layout, kinds[begin])
        # One of each is sent and one received, in both directions.
        yield 2 * (before + after)
        before = after


def stage_times(work: Workload, batch: Batch, recompute: str, ranks: Ranks, gpu: Gpu) -> StageTimes:
    """Seconds of a wave's forward and backward on each stage, and of the way to the next one."""
    inside = replace(ranks, pipeline=1)
    passes = [
        pass_seconds(own, batch.wave_size, recompute, inside, gpu)
        for own in stage_works(work, ranks)
    ]
    # Stages are as far apart as can be: all ranks of one stage come before those of the next.
    inside_node = ranks.trajectory * ranks.data * ranks.pipeline <= gpu.per_node
    link = gpu.node_link if inside_node else gpu.network
    layout = work.layout(ranks, "none", batch.wave_size)
    message = work.forwards * boundary_bytes(work.shape, layout, work.shape.kinds[0])
    again = 1 if recompute == "full" else 0
    return StageTimes(
        tuple(forward for forward, _ in passes),
        tuple(backward + again * forward for forward, backward in passes),
        gpu.latency + message / link,
    )


def pipeline_seconds(
    work: Workload, batch: Batch, schedule: str, recompute: str, ranks: Ranks, gpu: Gpu
) -> IterationSeconds:
    """Predict the seconds of one iteration: what stages compute, and how long they wait."""
    inside = replace(ranks, pipeline=1)
    alone = [
        iteration_seconds(own, batch, schedule, recompute, inside, gpu)
        for own in stage_works(work, ranks)
    ]
    idle = iteration_bubble(work, batch, schedule, recompute, ranks, gpu)
    busy = (1 - idle) * ranks.pipeline
    return IterationSeconds(
        rollout=sum(seconds.rollout for seconds in alone) / busy,
        update=sum(seconds.update for seconds in alone) / busy,
        reduction=max(seconds.reduction for seconds in alone),
        idle=idle,
    )


def iteration_bubble(
    work: Workload, batch: Batch, schedule: str, recompute: str, ranks: Ranks, gpu: Gpu
) -> float:
    """Share in which the stages wait: waves go through them in rounds, the last one a small one."""
    times = stage_times(work, batch, recompute, ranks, gpu)
    own = trained_windows(work, schedule, batch.wave_size)
    rings = batch.waves, batch.waves_in_flight
    return waiting_in_rings(base_of(work, schedule), times, *rings, work.sampled_steps, own)
