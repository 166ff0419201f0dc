# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Rewards are computed beside the next wave's rollout where no graph waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.grpo.passes import WholeModel
from megatron_leangrpo.grpo.scoring import Scorer
from tests.grpo import tiny

WAVES = 4


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Iterator[str]:
    """A prompt file; tests of one process share a world."""
    yield tiny.write_prompts(tmp_path_factory.mktemp("prompts"))
    platform.destroy_distributed()


def start(prompts: str, **grpo: Any) -> Experiment:
    """Two groups of four in waves of two."""
    return tiny.start(tiny.tiny_config(prompts, grpo={"micro_batch_size": 2, **grpo}))


class WaitsForTheNextRollout:
    """A reward that is done only when the rollout of the wave after has begun."""

    def __init__(self, rollouts: list[int], changed: threading.Condition) -> None:
        self.rollouts, self.changed, self.calls = rollouts, changed, 0

    def __call__(self, images, prompts, metadata) -> torch.Tensor:
        self.calls += 1
        needed = min(self.calls + 1, WAVES)
        with self.changed:
            began = self.changed.wait_for(lambda: len(self.rollouts) >= needed, timeout=60)
        assert began, "the next wave waited for these rewards"
        return tiny.SmoothReward()(images, prompts, metadata)


@pytest.mark.parametrize(
    "grpo",
    # All graphs wait for the last wave where the standard deviation is that of all rewards.
    [{"schedule": "replay"}, {"schedule": "retain", "advantage": "flow_grpo_global_std"}],
    ids=["replay", "retain"],
)
def test_the_next_wave_is_rolled_out_while_rewards_are_computed(prompts, grpo):
    experiment = start(prompts, **grpo)
    rollouts: list[int] = []
    changed = threading.Condition()
    (name,) = experiment.scorer.reward.rewards
    experiment.scorer.reward.rewards[name] = WaitsForTheNextRollout(rollouts, changed)
    roll_out = WholeModel.roll_out

    def recorded(passes, waves, *others):
        with changed:
            rollouts.extend(wave.trajectory.wave.index for wave in waves)
            changed.notify_all()
        return roll_out(passes, waves, *others)

    with mock.patch.object(WholeModel, "roll_out", recorded):
        tiny.first_gradient(experiment, grpo["schedule"])
    assert rollouts == list(range(WAVES))


def test_retain_waits_for_the_rewards_that_complete_a_group_and_no_others(prompts):
    experiment = start(prompts, schedule="retain")
    events: list[str] = []
    roll_out, submit = WholeModel.roll_out, Scorer.submit

    def rolled_out(passes, waves, *others):
        events.extend(f"rollout {wave.trajectory.wave.index}" for wave in waves)
        return roll_out(passes, waves, *others)

    def submitted(scorer, trajectory, groups):
        score = submit(scorer, trajectory, groups)

        def scored():
            events.append(f"rewards {trajectory.wave.index}")
            return score()

        return scored

    with (
        mock.patch.object(WholeModel, "roll_out", rolled_out),
        mock.patch.object(Scorer, "submit", submitted),
    ):
        tiny.first_gradient(experiment, "retain")
    one_group = ["rollout 0", "rollout 1", "rewards 0", "rewards 1"]
    assert events == [*one_group, "rollout 2", "rollout 3", "rewards 2", "rewards 3"]


@pytest.mark.parametrize(
    "grpo",
    [
        {"schedule": "replay"},
        {"schedule": "retain"},
        {"schedule": "retain", "advantage": "flow_grpo_global_std"},
        {"schedule": "retain", "updates_per_rollout": 2},
    ],
    ids=["replay", "retain", "all groups", "two updates"],
)
def test_weights_and_metrics_are_those_of_rewards_computed_at_once(prompts, grpo):
    submit = Scorer.submit

    def at_once(self, trajectory, groups):
        scores = submit(self, trajectory, groups)()
        return lambda: scores

    found = []
    for patch in (submit, at_once):
        with mock.patch.object(Scorer, "submit", patch):
            experiment = start(prompts, **grpo)
            metrics = tiny.train(experiment, 2)
        found.append((tiny.weights(experiment), metrics))
    assert tiny.worst(found[0][0], found[1][0])[0] == 0
    assert found[0][1] == found[1][1]


def test_a_reward_that_raises_ends_the_iteration_with_its_error(prompts):
    experiment = start(prompts, schedule="replay")
    (name,) = experiment.scorer.reward.rewards
    experiment.scorer.reward.rewards[name] = lambda images, prompts, metadata: 1 / 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        tiny.first_gradient(experiment, "replay")
