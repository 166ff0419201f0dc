# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The rewards of one iteration, filled wave by wave on every rank and turned into advantages."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.grpo.advantages import Advantages, combine_advantages
from megatron_leangrpo.grpo.placement import Slot, Wave


class RewardTable:
    """Rewards `[groups, members, rewards]` in float64, by group and member, never by text.

    A member that has not been rewarded yet is missing; a reward that is not a number marks its
    whole group as dropped, on every rank alike.
    """

    def __init__(self, groups: int, group_size: int, names: Sequence[str]) -> None:
        self.names = tuple(names)
        shape = (groups, group_size, len(self.names))
        self.values = torch.zeros(shape, dtype=torch.float64)
        self.rewarded = torch.zeros(shape[:2], dtype=torch.bool)

    def add_wave(self, wave: Wave, scores: torch.Tensor) -> None:
        """Exchange the scores `[b, rewards]` of every rank's current wave (a collective)."""
        groups, members, _ = self.values.shape
        fresh = torch.zeros(groups, members, len(self.names) + 1, dtype=torch.float64)
        for slot, row in zip(wave.slots, scores.to("cpu", torch.float64), strict=True):
            fresh[slot.group, slot.member, :-1] = row
            fresh[slot.group, slot.member, -1] = 1
        fresh = fresh.to(platform.device())
        dist.all_reduce(fresh, group=platform.dp_group())
        fresh = fresh.cpu()
        self.values += fresh[..., :-1]
        self.rewarded |= fresh[..., -1] > 0

    @property
    def dropped(self) -> torch.Tensor:
        """`[groups]` bool: groups with a reward that is not finite."""
        return ~self.values.isfinite().all(dim=-1).all(dim=-1)

    def total(self, weights: Sequence[float]) -> torch.Tensor:
        """Weighted sum of the rewards, `[groups, members]`."""
        return self.values @ torch.tensor(weights, dtype=torch.float64)

    def mean(self, name: str) -> float:
        """Mean of one reward over the groups that were not dropped."""
        return self.values[~self.dropped][..., self.names.index(name)].mean().item()

    def advantages(self, weights: Sequence[float], convention: str, combination: str) -> Advantages:
        """Advantages of all samples, group by group; 0 where a group is incomplete or dropped."""
        groups, members, rewards = self.values.shape
        ids = torch.arange(groups).repeat_interleave(members)
        keep = (self.rewarded.all(dim=1) & ~self.dropped).repeat_interleave(members)
        rows = self.values.reshape(groups * members, rewards).T
        return combine_advantages(rows, weights, ids, convention, combination, keep)

    def terms(self, weights: Sequence[float], combination: str) -> torch.Tensor:
        """The rewards `[k, samples]` that advantages are affine in: their sum, or each of them."""
        rows = self.total(weights)[..., None] if combination == "reward_sum" else self.values
        return rows.flatten(0, 1).T

    def index(self, slot: Slot) -> int:
        """Where a slot's sample stands in `advantages`."""
        return slot.group * self.values.shape[1] + slot.member
