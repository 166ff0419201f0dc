# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which windows of a rollout jagg approximates: decided before the rollout, by the last scores.

A window is known by its position: first step and length. Its score says how well its velocities
agree with the line between its ends, averaged over all trajectories of an iteration. The best share
`jagg_frac` of the positions, rounded, is approximated in the next iteration; everything is exact
where no score is known, so in the first iteration. Deciding after the rollout would need every
graph.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.diffusion.selection import StepPlan
from megatron_leangrpo.grpo.schedules.jagg import (
    StepWindow,
    agreement,
    consecutive_windows,
    single_steps,
)
from megatron_leangrpo.grpo.trajectory import WaveTrajectory

Position = tuple[int, int]
"""First step and number of steps of a window."""


def saved_backwards(
    waves: Iterable[Sequence[StepPlan]], size: int, frac: float, boundary: int | None = None
) -> float:
    """Share of the backwards of some waves that jagg leaves out once it has scores."""
    steps = saved = 0
    positions: set[Position] = set()
    for plans in waves:
        for window in consecutive_windows(plans, size, boundary):
            rows = sum(window[0] in plan.trained for plan in plans)
            steps += rows * len(window)
            if len(window) > 2:
                positions.add((window[0], len(window)))
                saved += rows * (len(window) - 2)
    if not positions:
        return 0.0
    return saved / steps * math.floor(frac * len(positions) + 0.5) / len(positions)


class WindowRouter:
    """Groups the trained steps of each wave; this one leaves every step for itself."""

    approximated: frozenset[Position] = frozenset()
    """Positions of the windows that are not exact."""

    def windows(self, plans: Sequence[StepPlan]) -> list[StepWindow]:
        """Return the windows of a wave, in rollout order."""
        return single_steps(plans)

    def observe(self, trajectory: WaveTrajectory, plans: Sequence[StepPlan]) -> None:
        """Take note of the velocities of a wave."""

    def finish(self) -> dict[str, float]:
        """End an iteration and return its metrics (a collective)."""
        return {}

    def state(self) -> list[list[float]]:
        """What a resumed run needs to decide as this one would: position and score."""
        return []

    def load_state(self, state: Sequence[Sequence[float]]) -> None:
        """Continue from a state."""


class JaggRouter(WindowRouter):
    """Approximates the best `frac` of the windows of up to `size` steps.

    From step `boundary` on another transformer runs, whose Jacobian has nothing to do with the
    first one's.
    """

    def __init__(self, size: int, frac: float, num_steps: int, boundary: int | None = None) -> None:
        self.size, self.frac, self.num_steps, self.boundary = size, frac, num_steps, boundary
        self.scores: dict[Position, float] = {}
        self._clear()

    @property
    def approximated(self) -> frozenset[Position]:
        """Positions whose windows are approximated; ties go to the earlier window."""
        ranked = sorted(self.scores, key=lambda position: (-self.scores[position], position))
        return frozenset(ranked[: math.floor(self.frac * len(ranked) + 0.5)])

    def windows(self, plans: Sequence[StepPlan]) -> list[StepWindow]:
        """Return windows where they are approximated, and single steps elsewhere."""
        approximated = self.approximated
        result: list[StepWindow] = []
        for window in consecutive_windows(plans, self.size, self.boundary):
            if (window[0], len(window)) in approximated:
                result.append(window)
            else:
                result += [(step,) for step in window]
        return result

    def observe(self, trajectory: WaveTrajectory, plans: Sequence[StepPlan]) -> None:
        """Score every window, approximated or not; two steps have nothing in between."""
        if platform.pp_rank() < platform.pp_size() - 1:
            return
        steps, approximated = {step.index: step for step in trajectory.steps}, self.approximated
        for window in consecutive_windows(plans, self.size, self.boundary):
            rows = steps[window[0]].trained
            trained = rows.sum()
            position = (window[0], len(window))
            self._steps[0] += trained * len(window)
            if len(window) < 3:
                continue
            score = agreement([steps[step] for step in window])
            self._table[position] += torch.stack([torch.where(rows, score, 0.0).sum(), trained])
            if position in approximated:
                self._steps[1] += trained * len(window)

    def finish(self) -> dict[str, float]:
        """Average the scores over all trajectories of all ranks; they decide the next routing."""
        for tensor in (self._table, self._steps):
            dist.all_reduce(tensor, group=platform.dp_group())
            # Of a pipeline the last stage alone has seen velocities.
            platform.from_last_stage(tensor)
        sums, counts = self._table.unbind(dim=-1)
        self.scores = {
            (first, length): (sums[first, length] / counts[first, length]).item()
            for first, length in counts.nonzero().tolist()
        }
        every, approximated = self._steps.tolist()
        metrics = {
            "jagg_share": approximated / every if every else 0.0,
            **{f"jagg_score/{a}-{a + n - 1}": s for (a, n), s in sorted(self.scores.items())},
        }
        if counts.any():
            metrics["jagg_score"] = (sums.sum() / counts.sum()).item()
        self._clear()
        return metrics

    def state(self) -> list[list[float]]:
        """Return first step, length and score of each scored window."""
        return [[first, length, score] for (first, length), score in self.scores.items()]

    def load_state(self, state: Sequence[Sequence[float]]) -> None:
        """Continue from scores; those of windows that this run does not have are ignored."""
        self.scores = {(int(first), int(length)): score for first, length, score in state}

    def _clear(self) -> None:
        size, device = (self.num_steps, self.size + 1, 2), platform.device()
        self._table = torch.zeros(size, dtype=torch.float64, device=device)
        self._steps = torch.zeros(2, dtype=torch.float64, device=device)
        """Trained steps of this iteration, and those in windows that were approximated."""
