# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a schedule is: a way to evaluate the policy gradient of the trajectories of a wave.

On-policy the gradient is linear in the advantages, so a schedule is free to choose when the graph
of a step exists and when its backward runs. The rollout asks `keeps_graph` before each trained
step; once the rewards are known, `backward` adds the wave's gradient to the model's buffers.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from megatron_leangrpo.grpo.objective import Objective, step_loss
from megatron_leangrpo.grpo.policy import Velocity
from megatron_leangrpo.grpo.stats import UpdateStats
from megatron_leangrpo.grpo.trajectory import TrainedStep, WaveTrajectory


class Schedule(ABC):
    """Base of all schedules.

    Args:
        policy: the transformer whose weights are trained.
        objective: clip range, ratio normalisation and KL.
        reference: the frozen base policy; only needed for a KL term.
    """

    name: ClassVar[str]
    keeps_graph: ClassVar[bool]
    """Whether the rollout keeps the graph of its trained steps."""

    def __init__(
        self, policy: Velocity, objective: Objective, reference: Velocity | None = None
    ) -> None:
        self.policy, self.objective, self.reference = policy, objective, reference

    @abstractmethod
    def velocity(self, trajectory: WaveTrajectory, step: TrainedStep) -> torch.Tensor:
        """Return the velocity of a trained step with its graph attached."""

    def backward(
        self, trajectory: WaveTrajectory, advantages: torch.Tensor, scale: float, stats: UpdateStats
    ) -> None:
        """Add the gradient of a rewarded wave to the model's buffers.

        Args:
            trajectory: the wave; its steps, and with them retained graphs, are gone afterwards.
            advantages: `[b]` float64.
            scale: weight of one step of one trajectory, 1 / (trajectories x trained steps).
            stats: collects the statistics of each trained step.
        """
        has_signal = bool(advantages.any()) or self.objective.kl_beta > 0
        while trajectory.steps:
            step = trajectory.steps.pop()
            if not has_signal:
                continue
            reference = None
            if self.objective.kl_beta > 0:
                with torch.no_grad():
                    reference = self.reference(step.x, step.timestep, trajectory.conditioning)
            velocity = self.velocity(trajectory, step)
            loss, step_stats = step_loss(velocity, step, advantages, self.objective, reference)
            (loss.sum() * scale).backward()
            stats.add(step_stats, step.trained)
