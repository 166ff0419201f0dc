# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Memory and seconds of a rank where the blocks are split over pipeline stages.

A stage is reckoned as a transformer of its blocks alone. Embedders are the first stage's; the
inputs and the output, which are small, are counted on every stage.
"""

import math
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

from megatron_leangrpo.models.common.shape import BlockKind, TransformerShape
from megatron_leangrpo.pipeline.bubbles import bubble
from megatron_leangrpo.pipeline.order import graphs_in_flight
from megatron_leangrpo.pipeline.stages import balanced_split, time_costs
from megatron_leangrpo.pipeline.times import StageTimes
from megatron_leangrpo.planner.blocks import Layout
from megatron_leangrpo.planner.gpus import Gpu
from megatron_leangrpo.planner.kinds import block_tape
from megatron_leangrpo.planner.memory import RankMemory, rank_memory
from megatron_leangrpo.planner.seconds import IterationSeconds, iteration_seconds, pass_seconds
from megatron_leangrpo.planner.workload import Batch, Ranks, Workload


@lru_cache(maxsize=512)
def stage_works(
    work: Workload, batch: Batch, recompute: str, ranks: Ranks, gpu: Gpu
) -> tuple[Workload, ...]:
    """The run as each stage sees it: its own blocks, balanced by seconds."""
    inside = replace(ranks, pipeline=1)
    kinds = [kind for kind, count in work.shape.blocks for _ in range(count)]
    seconds = {kind: _block_seconds(work, kind, batch, recompute, inside, gpu) for kind in kinds}
    split = balanced_split(time_costs([seconds[kind] for kind in kinds], ranks.pipeline))
    works, begin = [], 0
    for count in split:
        own = tuple(kinds[begin : begin + count])
        works.append(_with_blocks(work, own, has_embedders=begin == 0))
        begin += count
    return tuple(works)


def _block_seconds(
    work: Workload, kind: BlockKind, batch: Batch, recompute: str, ranks: Ranks, gpu: Gpu
) -> float:
    """One forward and one backward of a block."""
    one, two = (_with_blocks(work, (kind,) * n, has_embedders=False) for n in (1, 2))
    both = [sum(pass_seconds(own, batch, recompute, ranks, gpu)) for own in (one, two)]
    return both[1] - both[0]


@lru_cache(maxsize=1024)
def _with_blocks(work: Workload, kinds: tuple[BlockKind, ...], has_embedders: bool) -> Workload:
    """The run of a transformer of some of its blocks."""
    shape = work.shape
    share = sum(_weights(shape, kind) for kind in kinds) / sum(
        count * _weights(shape, kind) for kind, count in shape.blocks
    )
    part = replace(
        shape,
        blocks=tuple((kind, len(list(same))) for kind, same in groupby(kinds)),
        sharded_parameters=math.ceil(shape.sharded_parameters * share),
        replicated_parameters=shape.replicated_parameters if has_embedders else 0,
    )
    trainable = None if work.trainable is None else math.ceil(work.trainable * share)
    return replace(work, shape=part, trainable=trainable)


@lru_cache(maxsize=64)
def _weights(shape: TransformerShape, kind: BlockKind) -> int:
    # With one byte a number the bytes of a tape's weight gradients are its parameters.
    return block_tape(kind, shape, Layout(batch=1, width=1)).weights


def waves_in_flight(batch: Batch, schedule: str, stages: int) -> int:
    """M: what fills the stages, and more where it costs next to nothing.

    More latents for replay, graphs that wait for their groups anyway for retain; a gradient buffer
    each for reweight.
    """
    wanted = {"replay": 4 * stages, "retain": max(stages, batch.graphs_in_flight)}
    return min(batch.trained_waves, wanted.get(schedule, stages))


def pipeline_memory(
    work: Workload, batch: Batch, schedule: str, recompute: str, ranks: Ranks, gpu: Gpu
) -> RankMemory:
    """Bytes on a rank of the stage that needs the most."""
    flight = waves_in_flight(batch, schedule, ranks.pipeline)
    inside = replace(ranks, pipeline=1)
    steps = math.ceil(work.trained_steps_of(batch.wave_size))
    stages = []
    for stage, own in enumerate(stage_works(work, batch, recompute, ranks, gpu)):
        held = graphs_in_flight("replay", ranks.pipeline, stage, flight, steps)
        stage_batch = replace(
            batch,
            graphs_in_flight=max(batch.graphs_in_flight, flight),
            graphs_of_a_step=held,
            pending=max(batch.pending, flight),
            # Each trajectory in flight collects its gradient in buffers of its own.
            moment_copies=batch.moment_copies + flight - 1,
        )
        stages.append(rank_memory(own, stage_batch, schedule, recompute, inside))
    return max(stages, key=lambda memory: memory.total)


def stage_times(work: Workload, batch: Batch, recompute: str, ranks: Ranks, gpu: Gpu) -> StageTimes:
    """Seconds of a wave's forward and backward on each stage, and of the way to the next one."""
    inside = replace(ranks, pipeline=1)
    works = stage_works(work, batch, recompute, ranks, gpu)
    passes = [pass_seconds(own, batch, recompute, inside, gpu) for own in works]
    link = gpu.node_link if ranks.trajectory * ranks.pipeline <= gpu.per_node else gpu.network
    forward, backward = zip(*passes)
    return StageTimes(forward, backward, gpu.latency + _boundary(work, batch, inside) / link)


def pipeline_seconds(
    work: Workload, batch: Batch, schedule: str, recompute: str, ranks: Ranks, gpu: Gpu
) -> IterationSeconds:
    """Predict the seconds of one iteration: what stages compute, and how long they wait."""
    inside = replace(ranks, pipeline=1)
    works = stage_works(work, batch, recompute, ranks, gpu)
    alone = [iteration_seconds(own, batch, schedule, recompute, inside, gpu) for own in works]
    times = stage_times(work, batch, recompute, ranks, gpu)
    trained = math.ceil(work.trained_steps_of(batch.wave_size))
    flight = waves_in_flight(batch, schedule, ranks.pipeline)
    idle = bubble(schedule, times, flight, work.sampled_steps, trained)
    # The last round of waves may be a small one; it takes as long as the others.
    rounds = math.ceil(batch.waves / flight) * flight / batch.waves
    idle = 1 - (1 - idle) / rounds
    busy = (1 - idle) * ranks.pipeline
    return IterationSeconds(
        rollout=sum(seconds.rollout for seconds in alone) / busy,
        update=sum(seconds.update for seconds in alone) / busy,
        reduction=max(seconds.reduction for seconds in alone),
        idle=idle,
    )


def _boundary(work: Workload, batch: Batch, ranks: Ranks) -> float:
    """Bytes that a rank hands to the next stage."""
    layout, shape = work.layout(ranks, "none", batch.wave_size), work.shape
    joint = Counter(dict(shape.blocks)).keys() & {"double", "single"}
    tokens = layout.shard(shape.text_tokens, shape.image_tokens)
    own = tokens if joint else layout.shard(shape.image_tokens) + shape.text_tokens
    return work.forwards * own * layout.batch * shape.hidden * layout.width
