# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a schedule is: a way to evaluate the policy gradient of the trajectories of a wave.

On-policy the gradient is linear in the advantages, so a schedule is free to choose when the graph
of a step exists and when its backward runs. Trained steps come in windows: a window of one step is
differentiated there, a longer one (jagg) at its two ends alone. Once the rewards are known,
`backward` adds the wave's gradient to the model's buffers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch

from megatron_leangrpo.grpo.advantages import Advantages
from megatron_leangrpo.grpo.gradient_buffers import GradientBuffers
from megatron_leangrpo.grpo.objective import Objective, step_loss
from megatron_leangrpo.grpo.policy import Velocity
from megatron_leangrpo.grpo.schedules.jagg import interpolate
from megatron_leangrpo.grpo.stats import UpdateStats
from megatron_leangrpo.grpo.trajectory import TrainedStep, WaveTrajectory, Window


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
    """Whether the rollout records the graphs of the ends of its windows."""

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
        """Start an update; `scale` is a step's weight: 1 / (trajectories x trained steps)."""
        self.scale = scale

    def window_drawn(  # noqa: B027
        self, trajectory: WaveTrajectory, window: Window, stats: UpdateStats
    ) -> None:
        """Take note of a window as soon as the rollout has drawn its last step."""

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

        The trajectory's windows, and with them retained graphs, are gone afterwards.
        """

    def finish(self) -> None:  # noqa: B027
        """Leave the whole gradient of the update in the buffers."""

    def _backward_window(
        self,
        window: Window,
        velocities: list[torch.Tensor],
        loss: Callable[[torch.Tensor, TrainedStep], torch.Tensor],
        retain_graph: bool = False,
        around_first: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        """Run the backwards of a window's ends, the last one first and the first one, in
        `around_first()`, last.

        `velocities` are those of its ends, graphs attached; `loss(velocity, step)` is `[b]`.
        Between the ends the rollout's velocity counts, which on-policy is the policy's.
        """
        evaluated = [step.velocity for step in window.steps]
        evaluated[0], evaluated[-1] = velocities[0], velocities[-1]
        cotangents = []
        for velocity, step in zip(evaluated, window.steps):
            leaf = velocity.detach().requires_grad_()
            weighted = loss(leaf, step).sum() * self.scale
            cotangents += torch.autograd.grad(weighted, leaf)
        # One by one: in a common backward every weight's gradient of one graph would wait for that
        # of the other, a whole copy of the gradient in the end.
        for velocity, cotangent in reversed(list(zip(velocities, interpolate(window, cotangents)))):
            with around_first() if velocity is velocities[0] else nullcontext():
                torch.autograd.backward(velocity, cotangent, retain_graph=retain_graph)

    def _replayed(self, trajectory: WaveTrajectory, window: Window) -> list[torch.Tensor]:
        """Run the forwards of a window's ends again, with gradients."""
        conditioning = trajectory.conditioning
        return [self.policy(step.x, step.timestep, conditioning) for step in window.ends]

    def _reference_velocity(self, trajectory: WaveTrajectory, step: TrainedStep) -> torch.Tensor:
        with torch.no_grad():
            return self.reference(step.x, step.timestep, trajectory.conditioning)


class DeferredSchedule(Schedule):
    """Runs the backwards once the advantages are known."""

    @abstractmethod
    def velocities(self, trajectory: WaveTrajectory, window: Window) -> list[torch.Tensor]:
        """Return the velocities of a window's ends with their graphs attached."""

    def backward(
        self,
        trajectory: WaveTrajectory,
        advantages: Advantages,
        stats: UpdateStats,
        around_last: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        """Run the backward of every window, the last one first; the very last in `around_last()`.

        There is none where no advantage gives a signal.
        """
        values = advantages.values.to(trajectory.latents.device)
        has_kl = self.objective.kl_beta > 0
        has_signal = bool(values.any()) or has_kl

        def loss(velocity: torch.Tensor, step: TrainedStep) -> torch.Tensor:
            reference = self._reference_velocity(trajectory, step) if has_kl else None
            result, step_stats = step_loss(velocity, step, values, self.objective, reference)
            stats.add(step_stats, step.trained)
            return result

        while trajectory.windows:
            window = trajectory.windows.pop()
            if has_signal:
                around = nullcontext if trajectory.windows else around_last
                velocities = self.velocities(trajectory, window)
                self._backward_window(window, velocities, loss, around_first=around)
