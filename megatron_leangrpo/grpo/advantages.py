# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Advantages from rewards, in float64, under the conventions of the published trainers.

All of them are affine in the reward: advantage = (reward - baseline) / denominator. Baseline and
denominator are returned too, because a schedule that weighs gradients after the rollout needs them.
Results do not depend on the order of the samples, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class AdvantageConvention:
    """How rewards become advantages; scopes are the samples of a prompt or all samples."""

    baseline: Literal["group", "global"] = "group"
    std: Literal["group", "global", "none", "leave_one_out"] = "group"
    ddof: int = 0
    """1 for the unbiased standard deviation."""
    epsilon: float = 0.0
    """Added to the standard deviation."""
    floor: float = 0.0
    """Lower bound of the standard deviation."""


CONVENTIONS: dict[str, AdvantageConvention] = {
    "flow_grpo_global_std": AdvantageConvention(std="global", epsilon=1e-4),
    "flow_grpo_group_std": AdvantageConvention(epsilon=1e-4),
    "dance_group": AdvantageConvention(ddof=1, epsilon=1e-8),
    "dance_global": AdvantageConvention("global", "global", ddof=1, epsilon=1e-8),
    "verl_omni_global_std": AdvantageConvention(std="global", ddof=1, epsilon=1e-4),
    "verl_omni_group_std": AdvantageConvention(ddof=1, epsilon=1e-4),
    "flow_factory": AdvantageConvention(floor=1e-6),
    "dr_grpo": AdvantageConvention(std="none"),
    "leave_one_out": AdvantageConvention(std="leave_one_out"),
}
COMBINATIONS = ("reward_sum", "advantage_sum", "gdpo")


@dataclass(frozen=True)
class Advantages:
    """values = sum over terms k of (rewards[k] - baseline[k]) / denominator[k].

    `rewards`, `baseline` and `denominator` are [k, n]: one term, or one per reward where
    advantages of several rewards are added (the weights are inside the denominators). A denominator
    of inf marks a sample without signal: constant group, group of one, dropped.
    """

    values: Tensor
    rewards: Tensor
    baseline: Tensor
    denominator: Tensor

    def select(self, indices: Sequence[int]) -> "Advantages":
        """The advantages of some samples, in the given order."""
        rows = torch.as_tensor(indices)
        return Advantages(
            self.values[rows],
            self.rewards[:, rows],
            self.baseline[:, rows],
            self.denominator[:, rows],
        )


def needs_all_groups(convention: str, combination: str = "reward_sum") -> bool:
    """Whether the advantages of one group depend on the rewards of others."""
    rule = _convention(convention)
    return combination == "gdpo" or "global" in (rule.baseline, rule.std)


def mean_is_final_early(convention: str, combination: str = "reward_sum") -> bool:
    """Whether a complete group lacks only a std, the same for all groups, for its advantages."""
    rule = _convention(convention)
    return combination == "reward_sum" and (rule.baseline, rule.std) == ("group", "global")


def finite_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Mask [n] of the samples whose whole group has finite rewards ([n] or [k, n])."""
    finite = rewards.isfinite().reshape(-1, rewards.shape[-1]).all(0)
    bad_groups = group_ids[~finite].unique()
    return ~torch.isin(group_ids, bad_groups)


def compute_advantages(
    rewards: Tensor, group_ids: Tensor, convention: str, keep: Tensor | None = None
) -> Advantages:
    """Advantages of rewards [n] whose prompts are told apart by integer `group_ids` [n].

    Samples outside the mask `keep` get exactly 0 and stay out of all statistics. A group (or, with
    a global baseline, a batch) of equal rewards is exactly 0. Raises ValueError for a non-finite
    reward among the kept ones.
    """
    rule = _convention(convention)
    rewards, group_ids, keep = _checked(rewards, group_ids, keep)
    groups = group_ids.unique(return_inverse=True)[1]
    everyone = torch.zeros_like(groups)
    scopes = {"group": groups, "global": everyone}

    baseline = _Statistics.of(rewards, scopes[rule.baseline], keep)
    if rule.std == "none":
        denominator = torch.ones_like(rewards)
    elif rule.std == "leave_one_out":
        # r - mean of the others = (r - mean) * n / (n - 1)
        denominator = (baseline.count - 1) / baseline.count
    else:
        spread = _Statistics.of(rewards, scopes[rule.std], keep)
        denominator = spread.std(rule.ddof).clamp(min=rule.floor) + rule.epsilon
    no_signal = baseline.constant | ~keep
    denominator = torch.where(no_signal, torch.inf, denominator)
    values = torch.where(no_signal, 0.0, (rewards - baseline.mean) / denominator)
    return Advantages(values, rewards[None], baseline.mean[None], denominator[None])


def combine_advantages(
    rewards: Tensor,
    weights: Sequence[float],
    group_ids: Tensor,
    convention: str,
    combination: str = "reward_sum",
    keep: Tensor | None = None,
) -> Advantages:
    """Advantages of several rewards [k, n].

    `reward_sum`: of the weighted sum of rewards (Flow-GRPO). `advantage_sum`: the weighted sum of
    each reward's advantages (MixGRPO). `gdpo`: that sum, divided by its own standard deviation over
    the batch (Flow-Factory).
    """
    if combination not in COMBINATIONS:
        raise ValueError(f"grpo.reward_combination={combination!r}: must be one of {COMBINATIONS}")
    weight = torch.as_tensor(weights, dtype=torch.float64, device=rewards.device)[:, None]
    assert rewards.dim() == 2 and len(weight) == len(rewards), "one weight for each row of rewards"
    if combination == "reward_sum":
        return compute_advantages((weight * rewards.double()).sum(0), group_ids, convention, keep)

    terms = [compute_advantages(row, group_ids, convention, keep) for row in rewards]
    values = (weight * torch.stack([term.values for term in terms])).sum(0)
    denominator = torch.cat([term.denominator for term in terms]) / weight
    if combination == "gdpo":
        # The published z-score also subtracts the batch mean, which is 0 but for rounding; leaving
        # it out keeps a constant group at exactly 0.
        counted = torch.ones_like(values, dtype=torch.bool) if keep is None else keep
        batch = torch.zeros_like(group_ids, dtype=torch.int64)
        std = _Statistics.of(values, batch, counted).std(ddof=0)
        std = std.clamp(min=CONVENTIONS["flow_factory"].floor)
        values, denominator = values / std, denominator * std
    return Advantages(
        values,
        torch.cat([term.rewards for term in terms]),
        torch.cat([term.baseline for term in terms]),
        denominator,
    )


def _convention(name: str) -> AdvantageConvention:
    if name not in CONVENTIONS:
        raise ValueError(f"grpo.advantage={name!r}: must be one of {tuple(CONVENTIONS)}")
    return CONVENTIONS[name]


def _checked(
    rewards: Tensor, group_ids: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    assert rewards.dim() == 1 and rewards.shape == group_ids.shape, "rewards and ids are [n]"
    assert not group_ids.is_floating_point(), "float32 ids collide above 2**24"
    keep = torch.ones_like(group_ids, dtype=torch.bool) if keep is None else keep.bool()
    rewards = rewards.double()
    bad = (~rewards.isfinite() & keep).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"rewards: {len(bad)} of {rewards.numel()} are not finite, the first is "
            f"{rewards[bad[0]].item()} at sample {bad[0]} of group {group_ids[bad[0]].item()}"
        )
    # 0 keeps a dropped NaN out of the sums, where a mask alone would leave NaN * 0.
    return torch.where(keep, rewards, 0.0), group_ids, keep


@dataclass(frozen=True)
class _Statistics:
    """Statistics of its own scope for each sample, over the kept samples: all [n], float64."""

    count: Tensor
    mean: Tensor
    square_sum: Tensor
    constant: Tensor

    @staticmethod
    def of(values: Tensor, scope: Tensor, keep: Tensor) -> "_Statistics":
        # Summed in ascending order, so that the order of the samples leaves no trace in the bits.
        order = values.argsort()
        total = int(scope.max()) + 1 if scope.numel() else 0

        def scope_sum(terms: Tensor) -> Tensor:
            sums = torch.zeros(total, dtype=torch.float64, device=values.device)
            terms = torch.where(keep, terms, 0.0)
            return sums.index_add(0, scope[order], terms[order])[scope]

        count = scope_sum(torch.ones_like(values)).clamp(min=1)
        mean = scope_sum(values) / count
        bounds = torch.full((total,), torch.inf, dtype=torch.float64, device=values.device)
        lowest = bounds.scatter_reduce(0, scope, torch.where(keep, values, torch.inf), "amin")
        highest = (-bounds).scatter_reduce(0, scope, torch.where(keep, values, -torch.inf), "amax")
        return _Statistics(
            count=count,
            mean=mean,
            square_sum=scope_sum((values - mean) ** 2),
            constant=(lowest >= highest)[scope],
        )

    def std(self, ddof: int) -> Tensor:
        """Standard deviation; 0 for a scope of one sample."""
        return (self.square_sum / (self.count - ddof).clamp(min=1)).sqrt()
