# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Statistics of an update, collected step by step and reduced over data-parallel ranks once."""

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.grpo.objective import StepStats

MEANS = (
    "ratio_mean",
    "approx_kl",
    "clip_fraction",
    "clip_fraction_high",
    "clip_fraction_low",
    "policy_loss",
    "kl",
)


class UpdateStats:
    """Ratio range and means over all trained steps of all trajectories of one update."""

    def __init__(self) -> None:
        device = platform.device()
        self._sums = torch.zeros(len(MEANS) + 1, dtype=torch.float64, device=device)
        self._bounds = torch.full((2,), -torch.inf, dtype=torch.float64, device=device)

    def add(self, stats: StepStats, trained: torch.Tensor) -> None:
        """Add the statistics `[b]` of one step; samples that do not train it do not count."""
        ratio = stats["ratio"]
        zero = torch.zeros_like(ratio)
        rows = [ratio, *(stats.get(name, zero) for name in MEANS[1:]), torch.ones_like(ratio)]
        self._sums += torch.where(trained, torch.stack(rows), 0.0).sum(dim=1)
        bounds = torch.where(trained, torch.stack([-ratio, ratio]), -torch.inf).amax(dim=1)
        self._bounds = torch.maximum(self._bounds, bounds)

    def reduced(self) -> dict[str, float]:
        """Return ratio_min, ratio_max and the means over all ranks (a collective).

        Where no rank had a step with signal the ratio is 1 and the rest is 0.
        """
        dist.all_reduce(self._sums, group=platform.dp_group())
        dist.all_reduce(self._bounds, op=dist.ReduceOp.MAX, group=platform.dp_group())
        # Of a pipeline the last stage alone has seen losses.
        *sums, count = platform.from_last_stage(self._sums).tolist()
        bounds = platform.from_last_stage(self._bounds).tolist()
        if count == 0:
            return {"ratio_min": 1.0, "ratio_max": 1.0, **dict.fromkeys(MEANS, 0.0)}
        low, high = bounds
        means = {name: value / count for name, value in zip(MEANS, sums)}
        return {"ratio_min": -low, "ratio_max": high, **means}
