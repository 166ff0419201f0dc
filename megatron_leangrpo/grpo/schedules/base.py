# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a schedule is: a way to evaluate the policy gradient of the trajectories of a wave.

On-policy the gradient is linear in the advantages, so a schedule is free to choose when the graph
of a step exists and when its backward runs. The rollout asks `keeps_graph` before each trained
step; once the rewards are known, `backward` adds the wave's gradient to the model's buffers.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from megatron_leangrpo.grpo.advantages import Advantages
from megatron_leangrpo.grpo.gradient_buffers import GradientBuffers
from megatron_leangrpo.grpo.objective import Objective, step_loss
from megatron_leangrpo.grpo.policy import Velocity
from megatron_leangrpo.grpo.stats import UpdateStats
from megatron_leangrpo.grpo.trajectory import TrainedStep, WaveTrajectory


class Schedule(ABC):
    """Base of all schedules; an iteration calls the methods in the order in which they stand here.

    Args:
        policy: the transformer whose weights are trained.
        objective: clip range, ratio normalisation and KL.
        reference: the frozen base policy; only needed for a KL term.
        buffers: where the backwards collect the gradient.
    """

    name: ClassVar[str]
    keeps_graph: ClassVar[bool]
    """Whether the rollout records the graph of its trained steps."""

    def __init__(
        self,
        policy: Velocity,
        objective: Objective,
        reference: Velocity | None = None,
        buffers: GradientBuffers | None = None,
    ) -> None:
        self.policy, self.objective, self.reference = policy, objective, reference
        self.buffers, self.scale = buffers, 1.0

    def begin(self, scale: float) -> None:
        """Start a window; `scale` is the weight of one step: 1 / (trajectories x trained steps)."""
        self.scale = scale

    def step_drawn(  # noqa: B027
        self, trajectory: WaveTrajectory, step: TrainedStep, stats: UpdateStats
    ) -> None:
        """Take note of a trained step as soon as the rollout has drawn it."""

    def wave_rewarded(  # noqa: B027
        self, trajectory: WaveTrajectory, rewards: torch.Tensor
    ) -> None:
        """Take note of a wave's rewards `[rewards, b]`, each the term of an advantage."""

    def group_complete(self, group: int, advantages: Advantages) -> None:  # noqa: B027
        """Take note that a group's mean is final, where its advantages must wait for others."""

    @abstractmethod
    def backward(
        self, trajectory: WaveTrajectory, advantages: Advantages, stats: UpdateStats
    ) -> None:
        """Add the gradient of a wave, whose advantages are known, to the model's buffers.

        The trajectory's steps, and with them retained graphs, are gone afterwards.
        """

    def finish(self) -> None:  # noqa: B027
        """Leave the whole gradient of the window in the buffers."""


class DeferredSchedule(Schedule):
    """Runs the backwards once the advantages are known."""

    @abstractmethod
    def velocity(self, trajectory: WaveTrajectory, step: TrainedStep) -> torch.Tensor:
        """Return the velocity of a trained step with its graph attached."""

    def backward(
        self, trajectory: WaveTrajectory, advantages: Advantages, stats: UpdateStats
    ) -> None:
        """Run the backward of every trained step, last step first."""
        values = advantages.values.to(trajectory.latents.device)
        has_signal = bool(values.any()) or self.objective.kl_beta > 0
        while trajectory.steps:
            step = trajectory.steps.pop()
            if not has_signal:
                continue
            reference = None
            if self.objective.kl_beta > 0:
                with torch.no_grad():
                    reference = self.reference(step.x, step.timestep, trajectory.conditioning)
            velocity = self.velocity(trajectory, step)
            loss, step_stats = step_loss(velocity, step, values, self.objective, reference)
            (loss.sum() * self.scale).backward()
            stats.add(step_stats, step.trained)
