# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a schedule is: a way to evaluate the policy gradient of the trajectories of a wave.

On-policy the gradient is linear in the advantages, so a schedule is free to choose when the graph
of a step exists and when its backward runs. Trained steps come in windows: a window of one step is
differentiated there, a longer one (jagg) at its two ends alone. A schedule says what is
differentiated and where the gradient goes; forwards and backwards themselves are the business of
`Passes`, be the transformer on one rank or cut into pipeline stages.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, NamedTuple, Protocol

import torch

from megatron_leangrpo.grpo.advantages import Advantages
from megatron_leangrpo.grpo.gradient_buffers import Flat, GradientBuffers
from megatron_leangrpo.grpo.objective import Objective, step_loss
from megatron_leangrpo.grpo.schedules.jagg import interpolate
from megatron_leangrpo.grpo.stats import UpdateStats
from megatron_leangrpo.grpo.trajectory import TrainedStep, WaveTrajectory, Window


class Term(NamedTuple):
    """A part of a trajectory's loss whose gradient is collected for itself."""

    buffers: Flat
    """Where it is collected."""
    loss: Callable[[torch.Tensor, TrainedStep], torch.Tensor]
    """From a velocity `[b, s, c]` and its step to the loss, a scalar."""


Terms = Callable[[WaveTrajectory], Sequence[Term]]
"""The terms of a trajectory's loss; every pipeline stage asks for them, the last evaluates them."""

Around = Callable[[], AbstractContextManager]


class Passes(Protocol):
    """Runs backwards of recorded trajectories."""

    def backward(
        self,
        trajectories: Sequence[WaveTrajectory],
        terms: Terms,
        *,
        replays: bool,
        around_last: Around = nullcontext,
    ) -> None:
        """Run the backwards of all windows, the very last one in `around_last()`.

        Either the rollout's graphs are used, or the forwards of the ends run again. The
        trajectories' windows, and with them retained graphs, are gone afterwards.
        """

    def drop(self, trajectory: WaveTrajectory) -> None:
        """Let go of a trajectory's windows and graphs."""


class Schedule(ABC):
    """Base of all schedules; an iteration calls the methods in the order in which they stand here.

    Args:
        passes: runs the backwards.
        objective: clip range, ratio normalisation and KL.
        buffers: where they collect the gradient.
    """

    name: ClassVar[str]
    keeps_graph: ClassVar[bool]
    """Whether the rollout records the graphs of the ends of its windows."""
    at_once: ClassVar[bool] = False
    """Whether a window's backwards follow as soon as its last step is drawn, by `terms`."""

    def __init__(self, passes: Passes, objective: Objective, buffers: GradientBuffers) -> None:
        self.passes, self.objective, self.buffers = passes, objective, buffers
        self.scale = 1.0

    def begin(self, scale: float) -> None:
        """Start an update; `scale` is a step's weight: 1 / (trajectories x trained steps)."""
        self.scale = scale

    def terms(self, trajectory: WaveTrajectory) -> list[Term]:
        """What is differentiated during the rollout."""
        raise NotImplementedError

    def wave_rewarded(  # noqa: B027
        self, trajectory: WaveTrajectory, rewards: torch.Tensor
    ) -> None:
        """Take note of a wave's rewards `[rewards, b]`, each the term of an advantage."""

    def group_complete(self, group: int, advantages: Advantages) -> None:  # noqa: B027
        """Take note that a group's mean is final, where its advantages must wait for others."""

    @abstractmethod
    def train(
        self,
        ready: Sequence[tuple[WaveTrajectory, Advantages]],
        stats: UpdateStats,
        around_last: Around = nullcontext,
    ) -> None:
        """Add the gradient of waves whose advantages are known.

        Their windows are gone afterwards. `around_last` is for an update's very last backward.
        """

    def finish(self) -> None:  # noqa: B027
        """Leave the whole gradient of the update in the wrapper's buffers."""


class DeferredSchedule(Schedule):
    """Runs the backwards once the advantages are known."""

    def train(
        self,
        ready: Sequence[tuple[WaveTrajectory, Advantages]],
        stats: UpdateStats,
        around_last: Around = nullcontext,
    ) -> None:
        """Run the backwards of all waves with a signal in their advantages."""
        values = {t.wave.index: a.values.to(t.latents.device) for t, a in ready}
        with_signal = []
        for trajectory, _ in ready:
            if self.objective.kl_beta > 0 or values[trajectory.wave.index].any():
                with_signal.append(trajectory)
            else:
                self.passes.drop(trajectory)

        def terms(trajectory: WaveTrajectory) -> list[Term]:
            own = values[trajectory.wave.index]

            def loss(velocity: torch.Tensor, step: TrainedStep) -> torch.Tensor:
                result, step_stats = step_loss(
                    velocity, step, own, self.objective, step.reference_velocity
                )
                stats.add(step_stats, step.trained)
                return result.sum() * self.scale

            return [Term(self.buffers.own, loss)]

        self.passes.backward(
            with_signal, terms, replays=not self.keeps_graph, around_last=around_last
        )


def end_cotangents(
    window: Window, velocities: Sequence[torch.Tensor], term: Term
) -> list[torch.Tensor]:
    """Gradients of a term with respect to the velocities of a window's ends, which are given.

    Between the ends the rollout's velocity counts, which on-policy is the policy's.
    """
    evaluated = [step.velocity for step in window.steps]
    evaluated[0], evaluated[-1] = velocities[0], velocities[-1]
    cotangents = []
    for velocity, step in zip(evaluated, window.steps):
        leaf = velocity.detach().requires_grad_()
        cotangents += torch.autograd.grad(term.loss(leaf, step), leaf)
    return interpolate(window, cotangents)
