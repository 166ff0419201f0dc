# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Rewards: one file per reward, a registry, and their weighted sum."""

from megatron_leangrpo.rewards.base import Reward, RewardError, RewardScores
from megatron_leangrpo.rewards.registry import (
    WeightedReward,
    WeightedScores,
    build_reward,
    make_reward,
    register_reward,
    reward_names,
)

__all__ = [
    "Reward",
    "RewardError",
    "RewardScores",
    "WeightedReward",
    "WeightedScores",
    "build_reward",
    "make_reward",
    "register_reward",
    "reward_names",
]
