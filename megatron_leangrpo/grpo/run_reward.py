# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The rewards of a run from its configuration: local ones, and those of a reward server."""

import dataclasses
from pathlib import Path

from megatron_leangrpo.config import RemoteRewardConfig, RewardConfig
from megatron_leangrpo.rewards.base import ModelSettings
from megatron_leangrpo.rewards.registry import WeightedReward, build_reward
from megatron_leangrpo.rewards.remote import RemoteReward, RemoteSettings, remote_rewards
from megatron_leangrpo.rewards.vlm_judge import JudgeSettings
from megatron_leangrpo.rewards.weights import find_device


def build_run_reward(config: RewardConfig, needs_weights: bool = True) -> WeightedReward:
    """Build the rewards; their models are loaded when they first score.

    Without `needs_weights` rewards whose folders are not on this machine are left out.
    """
    if not needs_weights and (absent := absent_rewards(config)):
        weights = {name: w for name, w in config.weights.items() if name not in absent}
        config = dataclasses.replace(config, weights=weights)
        if not weights:
            return WeightedReward({}, {}, config.failure_policy, config.frame_interval)
    if config.batch_size < 1:
        raise ValueError(f"reward.batch_size = {config.batch_size} must be 1 or more")
    device = find_device("reward.device", config.device)
    judge = None if config.judge.url is None else JudgeSettings(**dataclasses.asdict(config.judge))
    settings = ModelSettings(config.paths, device, config.batch_size, config.offload, judge)
    remote = _remote(config.remote, list(config.weights))
    return build_reward(
        config.weights, config.failure_policy, settings, remote, config.frame_interval
    )


def absent_rewards(config: RewardConfig) -> list[str]:
    """Rewards of this machine whose folder of weights is not on it."""
    return [
        name
        for name in config.weights
        if name in config.paths
        and name not in config.remote.names
        and not Path(config.paths[name]).expanduser().exists()
    ]


def describe_rewards(config: RewardConfig) -> str:
    """Names, weights and what is missing here, on one line."""
    absent = absent_rewards(config)
    return ", ".join(
        f"{weight:g} x {name}"
        + (f" ({config.paths[name]}: not on this machine)" if name in absent else "")
        for name, weight in config.weights.items()
    )


def _remote(config: RemoteRewardConfig, names: list[str]) -> dict[str, RemoteReward]:
    if not config.names:
        return {}
    unknown = [name for name in config.names if name not in names]
    if unknown:
        raise ValueError(
            f"reward.remote.names has {unknown[0]!r}, which is not in reward.weights; "
            f"valid: {', '.join(names) or 'none'}"
        )
    if config.url is None:
        raise ValueError("reward.remote.url is not set; give the server of reward.remote.names")
    values = dataclasses.asdict(config)
    return remote_rewards(values.pop("names"), RemoteSettings(**values))
