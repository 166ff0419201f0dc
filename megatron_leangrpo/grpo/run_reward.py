# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The rewards of a run from its configuration: local ones, and those of a reward server."""

import dataclasses

from megatron_leangrpo.config import RemoteRewardConfig, RewardConfig
from megatron_leangrpo.rewards.base import ModelSettings
from megatron_leangrpo.rewards.registry import WeightedReward, build_reward
from megatron_leangrpo.rewards.remote import RemoteReward, RemoteSettings, remote_rewards
from megatron_leangrpo.rewards.weights import find_device


def build_run_reward(config: RewardConfig) -> WeightedReward:
    """Build the rewards; their models are loaded when they first score."""
    if config.batch_size < 1:
        raise ValueError(f"reward.batch_size = {config.batch_size} must be 1 or more")
    device = find_device("reward.device", config.device)
    settings = ModelSettings(config.paths, device, config.batch_size, config.offload)
    remote = _remote(config.remote, list(config.weights))
    return build_reward(
        config.weights, config.failure_policy, settings, remote, config.frame_interval
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
