# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The ways to run one iteration that are timed against each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megatron_leangrpo.conditioning.encoders import Conditioning
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.grpo.gradient_buffers import GradientBuffers
from megatron_leangrpo.grpo.iteration import IterationResult
from megatron_leangrpo.models.common.weights import unwrapped
from tests.benchmarks.diffusers_loop import DiffusersLoop


@dataclass(frozen=True)
class Contestant:
    """One way to run the first iteration's rollout and update without changing the weights."""

    name: str
    cost: str
    """What it costs in forwards, a name that `Case.forwards` knows."""
    run: Callable[[], float]
    """Returns the seconds of rollout and update; texts, pictures and rewards are not in them."""
    gradients: Callable[[], dict[str, Tensor]]
    """The whole gradient of the last run under diffusers' names (a collective)."""
    transformer: torch.nn.Module
    buffers: Callable[[], list[Tensor]]
    """The gradient buffers that outlive an iteration on this rank."""
    first_cost: str
    """What the first run costs; jagg's is exact, for it routes by what it saw the time before."""


class OurIteration:
    """One of our schedules, by the runner that trains and compares."""

    def __init__(self, experiment: Experiment, schedule: str) -> None:
        self.experiment, self.runner = experiment, experiment.runner(schedule)
        encode = cache(experiment.encode)

        def encoded_once(texts: Sequence[str]) -> Conditioning:
            return encode(tuple(texts))

        # The runner counts text encoders to the rollout; here they are nobody's cost, as every
        # contestant runs before the clock does.
        self.runner.encode = encoded_once

    def result(self) -> IterationResult:
        """Run the first iteration; its gradient is left in the buffers."""
        return self.runner.run(0, self.experiment.sampler.batch(0))

    def run(self) -> float:
        """Run the first iteration; the seconds of rollout and update."""
        metrics = self.result().metrics
        return metrics["time_rollout"] + metrics["time_update"]

    def advantages(self) -> Tensor:
        """The advantages of all samples, group by group."""
        scorer, grpo = self.experiment.scorer, self.experiment.config.grpo
        table = self.result().table
        values = table.advantages(scorer.weights, grpo.advantage, grpo.reward_combination).values
        assert values.abs().min() > 0, "a sample without advantage would cost replay nothing"
        return values


def our_contestant(
    experiment: Experiment, schedule: str, name: str | None = None, cost: str | None = None
) -> Contestant:
    """One of our schedules."""
    iteration = OurIteration(experiment, schedule)
    return Contestant(
        name=name or schedule,
        cost=cost or schedule,
        run=iteration.run,
        gradients=lambda: experiment.architecture.export_gradients(experiment.model),
        transformer=unwrapped(experiment.model),
        buffers=lambda: GradientBuffers(experiment.model).own,
        first_cost="retain" if schedule == "jagg" else cost or schedule,
    )


def diffusers_contestant(loop: DiffusersLoop, name: str, cost: str) -> Contestant:
    """A loop over diffusers' model."""
    loop.allocate_gradients()
    return Contestant(
        name=name,
        cost=cost,
        run=loop.run,
        gradients=loop.gradients,
        transformer=loop.model,
        buffers=lambda: [local(p.grad) for p in loop.model.parameters()],
        first_cost=cost,
    )


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
