# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Reweight: run each window's backward at once with advantage 1 and weigh the gradient later.

One trajectory is rolled out at a time, so that the buffers hold the gradient g of one advantage.
Every advantage is affine in the reward, A = (r - mean) / std, and the gradients of a group's
trajectories on this rank are summed into two moments with a shift b, the group's first reward here:

    S0 = sum g_i,   S1 = sum (r_i - b) g_i,   sum A_i g_i = (S1 - (mean - b) S0) / std

Without the shift the difference would cancel. A group with one trajectory here needs S0 alone.
Where std is that of all groups, complete groups are pooled and divided when it is known.
"""

import math
from dataclasses import dataclass, replace

import torch

from megatron_leangrpo.grpo.advantages import Advantages
from megatron_leangrpo.grpo.gradient_buffers import Flat, GradientBuffers
from megatron_leangrpo.grpo.objective import Objective, StepStats, reference_kl, step_loss
from megatron_leangrpo.grpo.policy import Velocity
from megatron_leangrpo.grpo.schedules.base import Schedule
from megatron_leangrpo.grpo.stats import UpdateStats
from megatron_leangrpo.grpo.trajectory import TrainedStep, WaveTrajectory, Window


@dataclass
class _Moments:
    """Moments over some trajectories; shift and `first` have an entry for each reward."""

    buffers: GradientBuffers
    shift: list[float]
    zeroth: Flat
    first: list[Flat | None]

    def add(self, gradient: Flat, rewards: list[float]) -> None:
        """Add the gradient of one more trajectory."""
        self.buffers.add_scaled(self.zeroth, gradient, 1.0)
        for k, (reward, shift) in enumerate(zip(rewards, self.shift, strict=True)):
            # A reward that is not finite drops its whole group: these moments are not used then.
            if math.isfinite(reward - shift) and reward != shift:
                self.first[k] = self.buffers.add_scaled(self.first[k], gradient, reward - shift)

    def weighted(
        self, total: Flat | None, baseline: list[float], denominator: list[float]
    ) -> Flat | None:
        """Return total + sum over rewards of (first - (baseline - shift) zeroth) / denominator."""
        add_scaled = self.buffers.add_scaled
        for first, shift, mean, std in zip(self.first, self.shift, baseline, denominator):
            if math.isinf(std):
                continue
            if mean != shift:
                total = add_scaled(total, self.zeroth, -(mean - shift) / std)
            if first is not None:
                total = add_scaled(total, first, 1 / std)
        return total


class ReweightSchedule(Schedule):
    """N + 2T forward-equivalents a sample; one step's activations, a few gradient buffers."""

    name = "reweight"
    keeps_graph = True

    def __init__(
        self,
        policy: Velocity,
        objective: Objective,
        reference: Velocity | None,
        buffers: GradientBuffers,
    ) -> None:
        super().__init__(policy, objective, reference, buffers)
        # The part that is linear in the advantage, whatever its size.
        self._linear = replace(objective, kl_beta=0.0, adv_clip=None)
        self._moments: dict[int, _Moments] = {}
        self._newest: _Moments | None = None
        """The moments whose zeroth is the gradient buffers themselves, until they are needed."""
        self._total: Flat | None = None
        self._pooled: Flat | None = None
        self._pooled_std = 1.0
        self._stats: dict[int, list[tuple[StepStats, torch.Tensor]]] = {}
        """Statistics of the steps of each wave, which wait for the advantage."""
        self._wave: Flat | None = None
        """What the wave's windows have collected, where a KL term shares the buffers."""

    def begin(self, scale: float) -> None:
        """Start an update; one that was interrupted leaves nothing behind."""
        super().begin(scale)
        self._moments, self._newest, self._stats = {}, None, {}
        self._total = self._pooled = self._wave = None

    def window_drawn(self, trajectory: WaveTrajectory, window: Window, stats: UpdateStats) -> None:
        """Run the backward of the window with advantage 1, and of the KL term into the total."""
        assert len(trajectory.wave.slots) == 1, "reweight needs one trajectory a wave"
        self._free_buffers()
        one = torch.ones(1, dtype=torch.float64, device=window.steps[0].velocity.device)
        has_kl = self.objective.kl_beta > 0
        kl = self._backward_kl(trajectory, window) if has_kl else {}

        def loss(velocity: torch.Tensor, step: TrainedStep) -> torch.Tensor:
            result, step_stats = step_loss(velocity, step, one, self._linear)
            if has_kl:
                step_stats["kl"] = kl[step.index]
            self._stats.setdefault(trajectory.wave.index, []).append((step_stats, step.trained))
            return result

        self._backward_window(window, [step.velocity for step in window.ends], loss)
        for step in window.ends:
            step.velocity = step.velocity.detach()

    def _backward_kl(self, trajectory: WaveTrajectory, window: Window) -> dict[int, torch.Tensor]:
        """The KL gradient does not scale with the advantage: it goes to the total directly.

        Returns the term `[b]` of each step.
        """
        values = {}

        def loss(velocity: torch.Tensor, step: TrainedStep) -> torch.Tensor:
            reference = self._reference_velocity(trajectory, step)
            kl = reference_kl(self.objective.kl_form, velocity, reference, step.coefficients)
            values[step.index] = kl.detach().double()
            return torch.where(step.trained, kl, 0.0) * self.objective.kl_beta

        self._wave = self.buffers.add_scaled(self._wave, self.buffers.current, 1.0)
        self.buffers.clear()
        velocities = [step.velocity for step in window.ends]
        self._backward_window(window, velocities, loss, retain_graph=True)
        self._move_into_total()
        return values

    def _move_into_total(self) -> None:
        self._total = self.buffers.add_scaled(self._total, self.buffers.current, 1.0)
        self.buffers.clear()

    def wave_rewarded(self, trajectory: WaveTrajectory, rewards: torch.Tensor) -> None:
        """Add the wave's gradient to the moments of its group."""
        if self._wave is not None:
            self.buffers.add_scaled(self.buffers.current, self._wave, 1.0)
            self.buffers.release(self._wave)
            self._wave = None
        group, values = trajectory.wave.slots[0].group, rewards[:, 0].tolist()
        if group in self._moments:
            self._moments[group].add(self.buffers.current, values)
            self.buffers.clear()
        else:
            nothing = [None] * len(values)
            self._newest = _Moments(self.buffers, values, self.buffers.current, nothing)
            self._moments[group] = self._newest

    def _free_buffers(self) -> None:
        """Move the newest group's gradient into a copy, unless the group is complete by now."""
        if self._newest is not None:
            self._newest.zeroth, self._newest = self.buffers.take(), None

    def _weigh(
        self, group: int, total: Flat | None, baseline: list[float], denominator: list[float]
    ) -> Flat | None:
        """Return total plus the weighted gradient of a group, whose copies are given back."""
        moments = self._moments.pop(group, None)
        if moments is None:
            return total
        total = moments.weighted(total, baseline, denominator)
        if moments is self._newest:
            self.buffers.clear()
            self._newest = None
        else:
            self.buffers.release(moments.zeroth)
        for first in moments.first:
            self.buffers.release(first)
        return total

    def group_complete(self, group: int, advantages: Advantages) -> None:
        """Pool a group whose mean is known and whose std, that of all groups, is not yet."""
        baseline = advantages.baseline[:, 0].tolist()
        signal = advantages.denominator[:, 0].isfinite().tolist()
        ones = [1.0 if has else math.inf for has in signal]
        self._pooled = self._weigh(group, self._pooled, baseline, ones)

    def backward(
        self, trajectory: WaveTrajectory, advantages: Advantages, stats: UpdateStats
    ) -> None:
        """Weigh the group of a trajectory, unless a member asked before or it is pooled."""
        group = trajectory.wave.slots[0].group
        baseline, std = advantages.baseline[:, 0].tolist(), advantages.denominator[:, 0].tolist()
        self._total = self._weigh(group, self._total, baseline, std)
        if math.isfinite(std[0]):
            self._pooled_std = std[0]
        clip, value = self.objective.adv_clip, advantages.values.item()
        clipped = value
        if clip is not None and abs(value) > clip:
            clipped = math.copysign(clip, value)
            self._replay_excess(trajectory, clipped - value)
        for step_stats, trained in self._stats.pop(trajectory.wave.index):
            if value != 0 or self.objective.kl_beta > 0:
                step_stats["policy_loss"] = step_stats["policy_loss"] * clipped
                stats.add(step_stats, trained)
        trajectory.windows.clear()

    def _replay_excess(self, trajectory: WaveTrajectory, excess: float) -> None:
        """Correct a trajectory whose advantage is clipped: replay it with A_clipped - A."""

        def loss(velocity: torch.Tensor, step: TrainedStep) -> torch.Tensor:
            weight = torch.full_like(step.old_log_prob, excess, dtype=torch.float64)
            return step_loss(velocity, step, weight, self._linear)[0]

        self._free_buffers()
        for window in trajectory.windows:
            self._backward_window(window, self._replayed(trajectory, window), loss)
        self._move_into_total()

    def _move_into_total(self) -> None:
        self._total = self.buffers.add_scaled(self._total, self.buffers.current, 1.0)
        self.buffers.clear()

    def finish(self) -> None:
        """Put the weighted gradient where the reduction expects it."""
        assert not self._moments, "groups were left without advantages"
        if self._pooled is not None:
            self._total = self.buffers.add_scaled(self._total, self._pooled, 1 / self._pooled_std)
            self.buffers.release(self._pooled)
        self.buffers.put(self._total)
        self._total = self._pooled = None
