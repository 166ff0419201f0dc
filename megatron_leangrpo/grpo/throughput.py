# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Samples, tokens and floating-point operations a second of an iteration, and MFU."""

from dataclasses import dataclass

from megatron_leangrpo import platform
from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.grpo.architecture import Architecture
from megatron_leangrpo.grpo.planning import workload_of
from megatron_leangrpo.planner.activations import forward_cost
from megatron_leangrpo.planner.gpus import known_peak
from megatron_leangrpo.planner.seconds import work_of
from megatron_leangrpo.planner.workload import Ranks, Workload


@dataclass(frozen=True)
class Throughput:
    """What an iteration consists of, by which its seconds are judged."""

    samples: int
    tokens: float | None
    """That the rollouts of all ranks put through the transformer, text included."""
    flops: float | None
    """Of one rank's matrix products: rollout and the schedule's forwards and backwards, without
    what activation recomputation repeats, evaluation, encoders and rewards."""
    peak: float | None
    """Dense operations a second of a rank's device in the model's dtype, by its data sheet."""

    def metrics(self, seconds: float) -> dict[str, float]:
        """Rates of an iteration that took so long; `mfu` only where the device's peak is known."""
        rates = {"samples_per_second": self.samples / seconds}
        if self.tokens is not None:
            rates["tokens_per_second"] = self.tokens / seconds
        if self.flops is not None:
            rates["tflops_per_rank"] = self.flops / seconds / 1e12
        if self.flops is not None and self.peak is not None:
            rates["mfu"] = self.flops / seconds / self.peak
        return rates


def throughput_of(config: RunConfig, architecture: Architecture) -> Throughput:
    """Reckon with the planner's operations for this layout; reads no weights.

    Of a family whose shape the planner does not know only samples are counted.
    """
    if architecture.family.shape is None:
        samples = config.grpo.prompts_per_iteration * config.grpo.group_size
        return Throughput(samples, tokens=None, flops=None, peak=None)
    work = workload_of(config, architecture)
    forwards = work.sampled_steps * (2 if work.guided else 1)
    return Throughput(
        samples=work.samples,
        tokens=work.samples * forwards * (work.shape.image_tokens + work.shape.text_tokens),
        flops=_flops_of_rank(work, config.grpo.schedule),
        peak=_peak(work.width),
    )


def _flops_of_rank(work: Workload, schedule: str) -> float:
    """Operations of an iteration on one rank; those of a pipeline's stages are taken as equal."""
    ranks = Ranks(platform.tp_size(), platform.group_size(platform.cp_group()), platform.dp_size())
    products = forward_cost(work.shape, work.layout(ranks, "none", 1)).flops
    # A frozen base gets no weight gradients.
    backward = (2 if work.trainable is None else 1) * work.graphs * products
    forward = work.forwards * products
    total = work.sampled_steps * forward
    for name, share in ((schedule, 1 / work.updates), ("replay", 1 - 1 / work.updates)):
        cost = work_of(work, name, 1, "none")
        total += share * (cost.forwards * forward + cost.backwards * backward)
    return work.samples / ranks.data * total / platform.pp_size()


def _peak(width: int) -> float | None:
    if platform.is_host():
        return None
    import torch

    return known_peak(torch.cuda.get_device_name(platform.device()), width)
