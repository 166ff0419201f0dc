# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Signs in the metrics that a run has stopped learning, each said once while it lasts."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import fmean, median, pstdev
from typing import Any

WINDOW = 5
"""Iterations that are averaged."""
HISTORY = 20
"""Iterations that a gradient norm is compared with."""
CONSTANT_SHARE = 0.9
SPIKE = 10.0
COLLAPSE = 4.0
"""Standard deviations of the reward, between iterations, by which a window's mean may fall."""


class Alarms:
    """Fed with the metrics of each iteration; `check` returns what is new and wrong."""

    @classmethod
    def after(cls, rows: Iterable[Mapping[str, Any]], rollbacks: int) -> "Alarms":
        """Those of a run with these metrics so far and so many rollbacks, each of which has begun
        anew."""
        alarms, known = cls(), 0
        for row in rows:
            taken = row.get("rollbacks") or 0
            if taken > known:
                alarms, known = cls(), taken
            alarms.check(row)
        return cls() if rollbacks > known else alarms

    def __init__(self) -> None:
        self._constant = 0
        self._norms: deque[float] = deque(maxlen=HISTORY)
        self._rewards: deque[float] = deque(maxlen=WINDOW)
        self._best, self._spread = -math.inf, 0.0
        self._active: set[str] = set()

    def check(self, metrics: Mapping[str, Any]) -> dict[str, str]:
        """Messages about this iteration, by what they are about (constant, spike, collapse).

        Those that were given for the iteration before are left out.
        """
        found = {
            "constant": self._constant_groups(metrics),
            "spike": self._spike(metrics),
            "collapse": self._collapse(metrics),
        }
        raised = {name: message for name, message in found.items() if message}
        new = {name: message for name, message in raised.items() if name not in self._active}
        self._active = set(raised)
        return new

    def _constant_groups(self, metrics: Mapping[str, Any]) -> str | None:
        share = metrics.get("zero_std_ratio")
        self._constant = self._constant + 1 if _number(share) and share >= CONSTANT_SHARE else 0
        if self._constant < WINDOW:
            return None
        return (
            f"{share:.0%} of the groups have had one and the same reward for {WINDOW} iterations "
            "and teach nothing; the reward is saturated, or the samples of a group do not differ "
            "(sampling.noise_level, grpo.group_size)"
        )

    def _spike(self, metrics: Mapping[str, Any]) -> str | None:
        norm = metrics.get("grad_norm")
        if not _number(norm):
            return None
        usual = median(self._norms) if len(self._norms) >= WINDOW else 0.0
        self._norms.append(norm)
        if usual == 0 or norm <= SPIKE * usual:
            return None
        return (
            f"the gradient norm is {norm:.3g}, {norm / usual:.0f} times its usual {usual:.3g}; "
            "lower optimizer.lr or optimizer.clip_grad if that goes on"
        )

    def _collapse(self, metrics: Mapping[str, Any]) -> str | None:
        reward = metrics.get("reward_mean")
        if not _number(reward):
            return None
        self._rewards.append(reward)
        if len(self._rewards) < WINDOW:
            return None
        mean = fmean(self._rewards)
        if mean >= self._best:
            self._best, self._spread = mean, pstdev(self._rewards)
        # The mean of a window moves less than one reward; a constant reward has no spread at all.
        allowed = COLLAPSE * max(self._spread, 1e-3 * abs(self._best)) / math.sqrt(WINDOW)
        if self._best - mean <= allowed:
            return None
        return (
            f"the reward has fallen from {self._best:.4g} to {mean:.4g}, means of {WINDOW} "
            "iterations; the best evaluation's checkpoint is kept, and operations.rollbacks goes "
            "back to it"
        )


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
