# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which stage of a pipeline gets which blocks, so that no stage is waited for."""

import math
from dataclasses import replace
from functools import lru_cache

from megatron_leangrpo.models.common.shape import BlockKind, TransformerShape
from megatron_leangrpo.pipeline.stages import balanced_split
from megatron_leangrpo.planner.blocks import Layout
from megatron_leangrpo.planner.gpus import PRESETS, Gpu
from megatron_leangrpo.planner.kinds import block_tape
from megatron_leangrpo.planner.seconds import pass_seconds
from megatron_leangrpo.planner.workload import Ranks, Workload

REFERENCE = PRESETS["h100-80gb"]
"""Whose published speeds a run is split by, wherever it runs: the same blocks on every rank."""


def stage_works(work: Workload, ranks: Ranks) -> tuple[Workload, ...]:
    """The run as each stage sees it."""
    works, begin = [], 0
    for count in split_of(work, ranks):
        works.append(_part(work, range(begin, begin + count)))
        begin += count
    return tuple(works)


def split_of(work: Workload, ranks: Ranks, gpu: Gpu = REFERENCE) -> tuple[int, ...]:
    """Blocks of each stage; a list is for its own number of stages."""
    split = work.pipeline_split
    if isinstance(split, tuple) and len(split) == ranks.pipeline:
        return split
    if split == "memory":
        weights = [_weights(work.shape, kind) for kind in work.shape.kinds]
        return balanced_split(weights, ranks.pipeline)
    # Neighbours or not: the number of data-parallel ranks changes no block.
    return split_by_time(work, replace(ranks, data=1), gpu)


@lru_cache(maxsize=512)
def split_by_time(work: Workload, ranks: Ranks, gpu: Gpu) -> tuple[int, ...]:
    """The split whose slowest stage is the fastest: seconds of a trajectory's N forwards and T
    backwards, embedders and output included.
    """
    inside, kinds = replace(ranks, pipeline=1), work.shape.kinds
    seconds: dict[tuple[BlockKind, bool, bool], float] = {}
    costs = []
    for n, kind in enumerate(kinds):
        place = kind, n == 0, n == len(kinds) - 1
        if place not in seconds:
            one = _part(work, range(n, n + 1))
            forward, backward = pass_seconds(one, work.micro_batch, "none", inside, gpu)
            seconds[place] = work.sampled_steps * forward + work.trained_steps * backward
        costs.append(seconds[place])
    return balanced_split(costs, ranks.pipeline)


@lru_cache(maxsize=512)
def _part(work: Workload, blocks: range) -> Workload:
    """The run as a stage with these blocks sees it."""
    trainable = work.trainable
    if trainable is not None:
        weights = [_weights(work.shape, kind) for kind in work.shape.kinds]
        share = sum(weights[n] for n in blocks) / sum(weights)
        trainable = math.ceil(trainable * share)
    return replace(work, shape=work.shape.stage(blocks), trainable=trainable)


@lru_cache(maxsize=64)
def _weights(shape: TransformerShape, kind: BlockKind) -> int:
    # With one byte a number the bytes of a tape's weight gradients are its parameters.
    return block_tape(kind, shape, Layout(batch=1, width=1)).weights
