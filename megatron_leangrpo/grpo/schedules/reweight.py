# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Reweight: run each step's backward at once with advantage 1 and weigh the gradient later.

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
from megatron_leangrpo.grpo.gradient_buffers import Flat, GradientBuffers, add_scaled
from megatron_leangrpo.grpo.objective import Objective, reference_kl, step_loss
from megatron_leangrpo.grpo.policy import Velocity
from megatron_leangrpo.grpo.schedules.base import Schedule
from megatron_leangrpo.grpo.stats import UpdateStats
from megatron_leangrpo.grpo.trajectory import TrainedStep, WaveTrajectory


@dataclass
class _Moments:
    """Moments over some trajectories; shift and `first` have an entry for each reward."""

    shift: list[float]
    zeroth: Flat | None
    first: list[Flat | None]

    def add(self, gradient: Flat, rewards: list[float]) -> None:
        """Add the gradient of one trajectory."""
        self.zeroth = add_scaled(self.zeroth, gradient, 1.0)
        for k, (reward, shift) in enumerate(zip(rewards, self.shift, strict=True)):
            # A reward that is not finite drops its whole group: these moments are not used then.
            if math.isfinite(reward - shift) and reward != shift:
                self.first[k] = add_scaled(self.first[k], gradient, reward - shift)

    def weighted(
        self, total: Flat | None, baseline: list[float], denominator: list[float]
    ) -> Flat | None:
        """Return total + sum over rewards of (first - (baseline - shift) zeroth) / denominator."""
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
        self._total: Flat | None = None
        self._pooled: Flat | None = None
        self._pooled_std = 1.0
        self._window: Flat | None = None

    def begin(self, scale: float) -> None:
        """Forget an unfinished window."""
        super().begin(scale)
        self._moments, self._total, self._pooled, self._window = {}, None, None, None

    def step_drawn(self, trajectory: WaveTrajectory, step: TrainedStep, stats: UpdateStats) -> None:
        """Run the backward of the step with advantage 1, and of the KL term into the total."""
        assert len(trajectory.wave.slots) == 1, "reweight needs one trajectory a wave"
        has_kl = self.objective.kl_beta > 0
        one = torch.ones(1, dtype=torch.float64, device=step.velocity.device)
        loss, step_stats = step_loss(step.velocity, step, one, self._linear)
        (loss.sum() * self.scale).backward(retain_graph=has_kl)
        if has_kl:
            step_stats["kl"] = self._backward_kl(trajectory, step)
        stats.add(step_stats, step.trained)
        step.velocity = step.velocity.detach()

    def _backward_kl(self, trajectory: WaveTrajectory, step: TrainedStep) -> torch.Tensor:
        """The KL gradient does not scale with the advantage: it goes to the total directly."""
        self._window = add_scaled(self._window, self.buffers.current, 1.0)
        self.buffers.clear()
        with torch.no_grad():
            reference = self.reference(step.x, step.timestep, trajectory.conditioning)
        kl = reference_kl(self.objective.kl_form, step.velocity, reference, step.coefficients)
        weighted = torch.where(step.trained, kl, 0.0).sum() * self.objective.kl_beta * self.scale
        weighted.backward()
        self._total = add_scaled(self._total, self.buffers.current, 1.0)
        self.buffers.clear()
        return kl.detach().double()

    def wave_rewarded(self, trajectory: WaveTrajectory, rewards: torch.Tensor) -> None:
        """Move the wave's gradient from the buffers into the moments of its group."""
        group, values = trajectory.wave.slots[0].group, rewards[:, 0].tolist()
        gradient, self._window = self._window or self.buffers.take(), None
        if group in self._moments:
            self._moments[group].add(gradient, values)
        else:
            self._moments[group] = _Moments(values, gradient, [None] * len(values))

    def group_complete(self, group: int, advantages: Advantages) -> None:
        """Pool a group whose mean is known and whose std, that of all groups, is not yet."""
        moments = self._moments.pop(group, None)
        if moments is not None:
            baseline = advantages.baseline[:, 0].tolist()
            signal = advantages.denominator[:, 0].isfinite().tolist()
            ones = [1.0 if has else math.inf for has in signal]
            self._pooled = moments.weighted(self._pooled, baseline, ones)

    def backward(
        self, trajectory: WaveTrajectory, advantages: Advantages, stats: UpdateStats
    ) -> None:
        """Weigh the group of a trajectory, unless a member asked before or it is pooled."""
        group = trajectory.wave.slots[0].group
        baseline, std = advantages.baseline[:, 0].tolist(), advantages.denominator[:, 0].tolist()
        moments = self._moments.pop(group, None)
        if moments is not None:
            self._total = moments.weighted(self._total, baseline, std)
        if math.isfinite(std[0]):
            self._pooled_std = std[0]
        clip, value = self.objective.adv_clip, advantages.values.item()
        if clip is not None and abs(value) > clip:
            self._replay_excess(trajectory, math.copysign(clip, value) - value)
        trajectory.steps.clear()

    def _replay_excess(self, trajectory: WaveTrajectory, excess: float) -> None:
        """Correct a trajectory whose advantage is clipped: replay it with A_clipped - A."""
        for step in trajectory.steps:
            weight = torch.full_like(step.old_log_prob, excess, dtype=torch.float64)
            velocity = self.policy(step.x, step.timestep, trajectory.conditioning)
            loss, _ = step_loss(velocity, step, weight, self._linear)
            (loss.sum() * self.scale).backward()
        self._total = add_scaled(self._total, self.buffers.current, 1.0)
        self.buffers.clear()

    def finish(self) -> None:
        """Put the weighted gradient where the reduction expects it."""
        assert not self._moments, "groups were left without advantages"
        if self._pooled is not None:
            self._total = add_scaled(self._total, self._pooled, 1 / self._pooled_std)
        self.buffers.put(self._total)
        self._total = self._pooled = None
