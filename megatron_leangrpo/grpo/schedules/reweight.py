# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Reweight: run each window's backward at once with advantage 1 and weigh the gradient later.

The gradient g of a trajectory, of advantage 1, collects in buffers of its own while it is rolled
out. Every advantage is affine in the reward, A = (r - mean) / std, and the gradients of a group's
trajectories on this rank are summed into two moments with a shift b, the group's first reward here:

    S0 = sum g_i,   S1 = sum (r_i - b) g_i,   sum A_i g_i = (S1 - (mean - b) S0) / std

Without the shift the difference would cancel. A group with one trajectory here needs S0 alone.
Where std is that of all groups, complete groups are pooled and divided when it is known.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from megatron_leangrpo.grpo.advantages import Advantages
from megatron_leangrpo.grpo.gradient_buffers import Flat, GradientBuffers
from megatron_leangrpo.grpo.objective import Objective, StepStats, reference_kl, step_loss
from megatron_leangrpo.grpo.schedules.base import Around, Passes, Schedule, Term
from megatron_leangrpo.grpo.stats import UpdateStats
from megatron_leangrpo.grpo.trajectory import TrainedStep, WaveTrajectory


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

    def release(self) -> None:
        """Give the buffers back."""
        for flat in (self.zeroth, *self.first):
            self.buffers.release(flat)


class ReweightSchedule(Schedule):
    """N + 2T forward-equivalents a sample; one step's activations, a few gradient buffers."""

    name = "reweight"
    keeps_graph = True
    at_once = True

    def __init__(self, passes: Passes, objective: Objective, buffers: GradientBuffers) -> None:
        super().__init__(passes, objective, buffers)
        # The part that is linear in the advantage, whatever its size.
        self._linear = replace(objective, kl_beta=0.0, adv_clip=None)
        self._moments: dict[int, _Moments] = {}
        self._gradients: dict[int, Flat] = {}
        """By wave, with advantage 1, until the wave is rewarded."""
        self._total: Flat | None = None
        self._pooled: Flat | None = None
        self._pooled_std = 1.0
        self._stats: dict[int, list[tuple[StepStats, torch.Tensor]]] = {}
        """Statistics of the steps of each wave, which wait for the advantage."""

    def begin(self, scale: float) -> None:
        """Start an update; one that was interrupted leaves nothing behind."""
        super().begin(scale)
        self._moments, self._gradients, self._stats = {}, {}, {}
        self._total = self._pooled = None
        self.buffers.reset()
        # Until the end nothing has to be in the wrapper's own buffers, so they serve as one more.
        self.buffers.release(self.buffers.own)

    def terms(self, trajectory: WaveTrajectory) -> list[Term]:
        """The policy's loss with advantage 1, and the KL term, which no advantage scales."""
        assert len(trajectory.wave.slots) == 1, "reweight needs one trajectory a wave"
        wave = trajectory.wave.index
        if wave not in self._gradients:
            self._gradients[wave] = self.buffers.empty()
        has_kl = self.objective.kl_beta > 0

        def loss(velocity: torch.Tensor, step: TrainedStep) -> torch.Tensor:
            one = torch.ones_like(step.old_log_prob, dtype=torch.float64)
            result, step_stats = step_loss(velocity, step, one, self._linear)
            if has_kl:
                step_stats["kl"] = self._kl(velocity.detach(), step).double()
            self._stats.setdefault(wave, []).append((step_stats, step.trained))
            return result.sum() * self.scale

        def kl(velocity: torch.Tensor, step: TrainedStep) -> torch.Tensor:
            value = torch.where(step.trained, self._kl(velocity, step), 0.0)
            return value.sum() * self.objective.kl_beta * self.scale

        policy = Term(self._gradients[wave], loss)
        if not has_kl:
            return [policy]
        if self._total is None:
            self._total = self.buffers.empty()
        return [Term(self._total, kl), policy]

    def _kl(self, velocity: torch.Tensor, step: TrainedStep) -> torch.Tensor:
        form = self.objective.kl_form
        return reference_kl(form, velocity, step.reference_velocity, step.coefficients)

    def wave_rewarded(self, trajectory: WaveTrajectory, rewards: torch.Tensor) -> None:
        """Add the wave's gradient to the moments of its group."""
        gradient = self._gradients.pop(trajectory.wave.index)
        group, values = trajectory.wave.slots[0].group, rewards[:, 0].tolist()
        if group in self._moments:
            self._moments[group].add(gradient, values)
            self.buffers.release(gradient)
        else:
            nothing = [None] * len(values)
            self._moments[group] = _Moments(self.buffers, values, gradient, nothing)

    def group_complete(self, group: int, advantages: Advantages) -> None:
        """Pool a group whose mean is known and whose std, that of all groups, is not yet."""
        baseline = advantages.baseline[:, 0].tolist()
        signal = advantages.denominator[:, 0].isfinite().tolist()
        ones = [1.0 if has else math.inf for has in signal]
        self._pooled = self._weigh(group, self._pooled, baseline, ones)

    def _weigh(
        self, group: int, total: Flat | None, baseline: list[float], denominator: list[float]
    ) -> Flat | None:
        """Return total plus the weighted gradient of a group, whose buffers are given back."""
        moments = self._moments.pop(group, None)
        if moments is None:
            return total
        total = moments.weighted(total, baseline, denominator)
        moments.release()
        return total

    def train(
        self,
        ready: Sequence[tuple[WaveTrajectory, Advantages]],
        stats: UpdateStats,
        around_last: Around = nullcontext,
    ) -> None:
        """Weigh the groups of trajectories, unless they are pooled, and correct what is clipped.

        The gradient is whole after `finish` only, so there is nothing to do in `around_last`.
        """
        excess: dict[int, float] = {}
        for trajectory, advantages in ready:
            group, wave = trajectory.wave.slots[0].group, trajectory.wave.index
            std = advantages.denominator[:, 0].tolist()
            self._total = self._weigh(group, self._total, advantages.baseline[:, 0].tolist(), std)
            if math.isfinite(std[0]):
                self._pooled_std = std[0]
            clip, value = self.objective.adv_clip, advantages.values.item()
            clipped = value
            if clip is not None and abs(value) > clip:
                clipped = math.copysign(clip, value)
                excess[wave] = clipped - value
            for step_stats, trained in self._stats.pop(wave, ()):
                if value != 0 or self.objective.kl_beta > 0:
                    step_stats["policy_loss"] = step_stats["policy_loss"] * clipped
                    stats.add(step_stats, trained)
        self._replay_excess([t for t, _ in ready if t.wave.index in excess], excess)
        for trajectory, _ in ready:
            self.passes.drop(trajectory)

    def _replay_excess(
        self, trajectories: Sequence[WaveTrajectory], excess: dict[int, float]
    ) -> None:
        """Correct trajectories whose advantage is clipped: replay them with A_clipped - A."""
        if not trajectories:
            return
        if self._total is None:
            self._total = self.buffers.empty()

        def terms(trajectory: WaveTrajectory) -> list[Term]:
            def loss(velocity: torch.Tensor, step: TrainedStep) -> torch.Tensor:
                value = excess[trajectory.wave.index]
                weight = torch.full_like(step.old_log_prob, value, dtype=torch.float64)
                return step_loss(velocity, step, weight, self._linear)[0].sum() * self.scale

            return [Term(self._total, loss)]

        self.passes.backward(trajectories, terms, replays=True)

    def finish(self) -> None:
        """Put the weighted gradient where the reduction expects it."""
        assert not self._moments, "groups were left without advantages"
        if self._pooled is not None:
            self._total = self.buffers.add_scaled(self._total, self._pooled, 1 / self._pooled_std)
            self.buffers.release(self._pooled)
        self.buffers.put(self._total)
        self._total = self._pooled = None
