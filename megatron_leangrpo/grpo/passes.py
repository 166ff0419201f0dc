# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Rollouts and backwards where a rank has the whole transformer (or its tensor-parallel share)."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from megatron_leangrpo.grpo.gradient_buffers import GradientBuffers
from megatron_leangrpo.grpo.policy import Policy
from megatron_leangrpo.grpo.rollout import WaveRollout
from megatron_leangrpo.grpo.schedules.base import Around, Schedule, Term, Terms, end_cotangents
from megatron_leangrpo.grpo.trajectory import WaveTrajectory, Window


class WholeModel:
    """Runs a wave's steps one after the other; an instance of `schedules.base.Passes`.

    Args:
        policy: the transformer whose weights are trained.
        reference: the frozen base policy; only needed for a KL term.
        buffers: where backwards collect the gradient.
    """

    waves_in_flight = 1

    def __init__(self, policy: Policy, reference: Policy | None, buffers: GradientBuffers) -> None:
        self.policy, self.reference, self.buffers = policy, reference, buffers

    def roll_out(
        self, rollouts: Sequence[WaveRollout], schedule: Schedule | None = None
    ) -> list[WaveTrajectory]:
        """Sample waves to the end; `schedule` says which graphs of on-policy waves are kept."""
        return [
            self._roll_out(rollout, schedule if rollout.is_on_policy else None)
            for rollout in rollouts
        ]

    def _roll_out(self, rollout: WaveRollout, schedule: Schedule | None) -> WaveTrajectory:
        sampling, trajectory = rollout.sampling, rollout.trajectory
        while not sampling.is_done:
            step = sampling.step
            inputs = sampling.x, sampling.timestep, trajectory.conditioning
            keeps = schedule is not None and schedule.keeps_graph and rollout.is_end(step)
            with torch.set_grad_enabled(keeps):
                velocity = self.policy(*inputs)
            reference = None
            if self.reference is not None and rollout.is_trained(step):
                with torch.no_grad():
                    reference = self.reference(*inputs)
            window = rollout.draw(velocity, reference)
            if window is not None and schedule is not None and schedule.at_once:
                self._backward(window, _retained(window), schedule.terms(trajectory))
                for end in window.ends:
                    end.velocity = end.velocity.detach()
        return rollout.finish(sampling.result, sampling.finite)

    def backward(
        self,
        trajectories: Sequence[WaveTrajectory],
        terms: Terms,
        *,
        replays: bool,
        around_last: Around = nullcontext,
    ) -> None:
        """Run the backwards of all windows, a trajectory's last one first."""
        for trajectory in trajectories:
            while trajectory.windows:
                window = trajectory.windows.pop()
                is_last = not trajectory.windows and trajectory is trajectories[-1]
                velocities = self._replayed(trajectory, window) if replays else _retained(window)
                around = around_last if is_last else nullcontext
                self._backward(window, velocities, terms(trajectory), around)

    def drop(self, trajectory: WaveTrajectory) -> None:
        """Let go of a trajectory's windows and graphs."""
        trajectory.windows.clear()

    def _replayed(self, trajectory: WaveTrajectory, window: Window) -> list[torch.Tensor]:
        conditioning = trajectory.conditioning
        return [self.policy(step.x, step.timestep, conditioning) for step in window.ends]

    def _backward(
        self,
        window: Window,
        velocities: Sequence[torch.Tensor],
        terms: Sequence[Term],
        around_last: Around = nullcontext,
    ) -> None:
        """Run the backwards of a window's ends, the last end first, for one term after another."""
        for term in terms:
            ends = list(zip(velocities, end_cotangents(window, velocities, term)))
            # One by one: in a common backward every weight's gradient of one graph would wait for
            # that of the other, a whole copy of the gradient in the end.
            with self.buffers.collecting_in(term.buffers):
                for velocity, cotangent in reversed(ends):
                    is_last = term is terms[-1] and velocity is velocities[0]
                    with around_last() if is_last else nullcontext():
                        torch.autograd.backward(
                            velocity, cotangent, retain_graph=term is not terms[-1]
                        )


def _retained(window: Window) -> list[torch.Tensor]:
    return [step.velocity for step in window.ends]
