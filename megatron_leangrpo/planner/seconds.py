# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Seconds of an iteration: matrix products, memory traffic and collectives of each phase.

Rewards, text encoders and decoding are not counted; they cost the same under every schedule.
"""

from dataclasses import dataclass

from megatron_leangrpo.planner.activations import forward_cost
from megatron_leangrpo.planner.gpus import Gpu
from megatron_leangrpo.planner.memory import backwards, base_of, windows
from megatron_leangrpo.planner.workload import Batch, Ranks, Workload

_TRAFFIC = 3.0
"""Bytes moved for a byte written: an operation reads two tensors of its output's size."""
_BACKWARD_SENT = 1.5
"""Bytes sent in a backward against its forward: a column-parallel linear gathers its input again
for the weight gradient."""
_REWEIGHT_PASSES = 8
"""Times that reweight reads or writes a gradient buffer for one trajectory: two moments read, read
and written, and the buffers emptied."""


@dataclass(frozen=True)
class Work:
    """Forwards and backwards of one wave, besides the rollout's forwards."""

    forwards: float
    backwards: float


@dataclass(frozen=True)
class IterationSeconds:
    """Predicted seconds of one iteration."""

    rollout: float
    update: float
    reduction: float
    """Summing gradients over ranks, and the optimizer."""
    idle: float = 0.0
    """Share of rollout and update in which the stages of a pipeline wait."""

    @property
    def total(self) -> float:
        """Rollout, update and reduction."""
        return self.rollout + self.update + self.reduction


def work_of(work: Workload, schedule: str, wave_size: int, recompute: str) -> Work:
    """What training a wave takes under a schedule (DESIGN section 1), jagg past its first
    iteration."""
    base, steps = base_of(work, schedule), work.trained_steps_of(wave_size)
    differentiated = steps
    if schedule == "jagg" and windows(work)[0]:
        differentiated = backwards(work, wave_size)
    forwards = differentiated if base == "replay" else 0.0
    runs = differentiated
    if work.kl:
        forwards += steps
        if base == "reweight":
            # The KL term does not scale with the advantage: a backward of its own.
            runs += differentiated
    if recompute == "full":
        forwards += runs
    return Work(forwards, runs)


def forward_equivalents(
    work: Workload, schedule: str, recompute: str, reference: bool = True
) -> float:
    """Cost of a trajectory, counted in forwards; a backward is two, or one with a frozen base."""
    cost = work_of(work, schedule, 1, recompute)
    backward = 2 if work.trainable is None else 1
    forwards = cost.forwards - (work.trained_steps if work.kl and not reference else 0)
    return work.sampled_steps + forwards + backward * cost.backwards


def iteration_seconds(
    work: Workload, batch: Batch, schedule: str, recompute: str, ranks: Ranks, gpu: Gpu
) -> IterationSeconds:
    """Predict the seconds of one iteration on a layout."""
    forward, backward = pass_seconds(work, batch.wave_size, recompute, ranks, gpu)
    rollout = batch.waves * work.sampled_steps * forward
    update = 0.0
    off_policy = batch.waves - batch.trained_waves
    for name, waves in ((schedule, batch.trained_waves), ("replay", off_policy)):
        cost = work_of(work, name, batch.wave_size, recompute)
        update += waves * (cost.forwards * forward + cost.backwards * backward)
    gradients = _trained(work, ranks.tensor) * work.wide
    if base_of(work, schedule) == "reweight":
        update += batch.trained_waves * _REWEIGHT_PASSES * gradients / gpu.bandwidth
    reduction = work.updates * _reduction_seconds(work, ranks, gpu)
    return IterationSeconds(rollout, update, reduction)


def pass_seconds(
    work: Workload, wave_size: int, recompute: str, ranks: Ranks, gpu: Gpu
) -> tuple[float, float]:
    """Seconds of one forward and of one backward of a wave's velocity."""
    cost = forward_cost(work.shape, work.layout(ranks, recompute, wave_size))
    products = cost.flops / gpu.flops(work.width)
    traffic = _TRAFFIC * cost.written / gpu.bandwidth
    # Tensor-parallel ranks are neighbours, then come those of the context.
    link = gpu.node_link if ranks.tensor <= gpu.per_node else gpu.network
    wider = gpu.node_link if ranks.trajectory <= gpu.per_node else gpu.network
    sending = (cost.sent - cost.exchanged) / link + cost.exchanged / wider
    waiting = cost.collectives * gpu.latency if ranks.trajectory > 1 else 0.0
    forward = products + traffic + sending + waiting
    factor = 2 if work.trainable is None else 1
    # A weight gradient is written, read and added to its wide buffer.
    weights = _trained(work, ranks.tensor) / work.shape.experts * (2 * work.width + 2 * work.wide)
    backward = factor * (products + traffic) + _BACKWARD_SENT * (sending + waiting)
    backward += weights / gpu.bandwidth
    return work.forwards * forward, work.graphs * backward


def _reduction_seconds(work: Workload, ranks: Ranks, gpu: Gpu) -> float:
    """Gradients summed, weights gathered, and an AdamW step."""
    parameters, copies = _trained(work, ranks.tensor), ranks.weights
    share = copies if work.distributed_optimizer else 1
    # Two moments and a wide copy are read and written, the gradient read, the weight written.
    optimizer = parameters / share * (6 * work.wide + work.wide + work.width) / gpu.bandwidth
    if copies == 1:
        return optimizer
    link = gpu.node_link if ranks.tensor * copies <= gpu.per_node else gpu.network
    gathered = work.width if work.distributed_optimizer else work.wide
    return optimizer + parameters * (work.wide + gathered) * (copies - 1) / copies / link


def _trained(work: Workload, tp: int) -> float:
    return work.shape.parameters_of_rank(tp) if work.trainable is None else work.trainable / tp
