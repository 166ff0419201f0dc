# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Rewards that are constant, fail or explode: every rank does the same, and nothing is spoilt."""

from __future__ import annotations

import json
import math
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.config_reader import write_config
from megatron_leangrpo.grpo import commands
from megatron_leangrpo.grpo.placement import Group
from megatron_leangrpo.grpo.rollout import WaveRollout
from megatron_leangrpo.operations.finite import NotFiniteError
from megatron_leangrpo.rewards.base import RewardError
from tests.grpo import tiny

# Which prompts the rewards below treat badly; every process of a test sets its own.
BAD_PROMPTS: set[str] = set()
FIRST, SECOND = "the number 0", "the number 1"


class _OneBadPrompt(tiny.SmoothReward):
    """The smooth reward, but for prompts in `BAD_PROMPTS`."""

    def bad(self, score: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def __call__(self, images, prompts, metadata) -> torch.Tensor:
        scores = super().__call__(images, prompts, metadata)
        rows = [self.bad(s) if p in BAD_PROMPTS else s for p, s in zip(prompts, scores)]
        return torch.stack(rows)


class Constant(_OneBadPrompt):
    def bad(self, score):
        return torch.full_like(score, 0.1)


class Raises(_OneBadPrompt):
    def bad(self, score):
        raise ConnectionError("the server is away")


class NotANumber(_OneBadPrompt):
    def bad(self, score):
        return torch.full_like(score, math.nan)


class Infinite(_OneBadPrompt):
    def bad(self, score):
        return torch.full_like(score, math.inf)


class Enormous(_OneBadPrompt):
    """Finite in float64, but a gradient of this size is not finite in float32."""

    def bad(self, score):
        return score * 1e300


def name_of(reward: type) -> str:
    return f"tests.grpo.test_failures:{reward.__name__}"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    return tiny.write_prompts(tmp_path_factory.mktemp("prompts"), count=2)


def _gradient(
    prompts: str, reward: str, bad: set[str], sections: dict[str, Any]
) -> tuple[tiny.Tensors, dict[str, float]]:
    BAD_PROMPTS.clear()
    BAD_PROMPTS.update(bad)
    policy = {"weights": {reward: 1.0}, "failure_policy": "drop_group"}
    config = tiny.tiny_config(prompts, reward=policy, **sections)
    return tiny.first_gradient(tiny.start(config), config.grpo.schedule)


LAYOUTS = {
    "dp 2 local": {"grpo": {"placement": "local"}},
    "dp 2 spread": {"grpo": {"placement": "spread"}},
    "tp 2": {"parallel": {"tensor_model_parallel_size": 2}},
}


@pytest.mark.parametrize("schedule", ["replay", "retain", "reweight"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_constant_groups_everywhere_are_an_update_of_nothing(run_ranks, prompts, layout, schedule):
    sections = dict(LAYOUTS[layout])
    size = {"micro_batch_size": 1} if schedule == "reweight" else {}
    sections["grpo"] = {**sections.get("grpo", {}), "schedule": schedule, **size}
    arguments = (prompts, name_of(Constant), {FIRST, SECOND}, sections)
    for gradient, metrics in run_ranks(2, _gradient, *arguments, timeout_seconds=60):
        assert all(not tensor.any() for tensor in gradient.values())
        assert metrics["zero_std_ratio"] == 1
        assert metrics["ratio_min"] == metrics["ratio_max"] == 1
        assert metrics["clip_fraction"] == metrics["policy_loss"] == 0


@pytest.mark.parametrize("schedule", ["replay", "retain", "reweight"])
def test_a_rank_with_constant_groups_waits_for_one_with_work(run_ranks, prompts, schedule):
    """Placed locally, rank 0 or 1 has nothing to do; the gradient is that of one process."""
    size = 1 if schedule == "reweight" else 2
    sections = {"grpo": {"placement": "local", "schedule": schedule, "micro_batch_size": size}}
    arguments = (prompts, name_of(Constant), {FIRST}, sections)
    expected, _ = _gradient(*arguments)
    platform.destroy_distributed()
    for gradient, metrics in run_ranks(2, _gradient, *arguments, timeout_seconds=60):
        assert tiny.worst(gradient, expected)[0] < 1e-5
        assert metrics["zero_std_ratio"] == 0.5
        assert metrics["ratio_min"] == metrics["ratio_max"] == 1


@pytest.mark.parametrize("reward", [Raises, NotANumber, Infinite])
def test_a_failed_reward_ends_the_run_by_name_where_the_policy_says_raise(
    single_process, prompts, reward
):
    BAD_PROMPTS.clear()
    BAD_PROMPTS.add(SECOND)
    config = tiny.tiny_config(prompts, reward={"weights": {name_of(reward): 1.0}})
    experiment = tiny.start(config)
    with pytest.raises(RewardError) as error:
        tiny.first_gradient(experiment, "retain")
    what = {Raises: "the server is away", NotANumber: "nan", Infinite: "inf"}[reward]
    assert all(part in str(error.value) for part in (name_of(reward), SECOND, what))


@pytest.mark.parametrize("reward", [Raises, NotANumber, Infinite])
@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        ("alone", "retain"),
        ("alone", "reweight"),
        ("dp 2 local", "retain"),
        ("dp 2 spread", "retain"),
        ("dp 2 spread", "reweight"),
    ],
)
def test_a_dropped_group_has_advantage_zero_and_the_others_do_not_notice(
    run_ranks, prompts, reward, layout, schedule
):
    size = 1 if schedule == "reweight" else 3
    grpo = {"schedule": schedule, "micro_batch_size": size}
    sections = {"grpo": {**grpo, **LAYOUTS.get(layout, {}).get("grpo", {})}}
    expected, _ = _gradient(prompts, name_of(Constant), {SECOND}, sections)
    arguments = (prompts, name_of(reward), {SECOND}, sections)
    results = [_gradient(*arguments)] if layout == "alone" else run_ranks(2, _gradient, *arguments)
    platform.destroy_distributed()
    for gradient, metrics in results:
        assert tiny.worst(gradient, expected)[0] < (1e-5 if len(results) > 1 else 1e-15)
        assert metrics["dropped_groups"] == 1
        assert math.isfinite(metrics["reward_mean"])
    assert any(tensor.any() for tensor in expected.values())


class FailsInIterationTwo(tiny.SmoothReward):
    """Every picture of the second iteration; evaluations pass."""

    calls = 0

    def __call__(self, images, prompts, metadata) -> torch.Tensor:
        FailsInIterationTwo.calls += 1
        # Evaluation, one wave of iteration 1, one of iteration 2 and its 8 pictures one by one.
        if 3 <= self.calls <= 11:
            raise ConnectionError("the server is away")
        return super().__call__(images, prompts, metadata)


def test_an_iteration_without_any_reward_passes_and_the_run_goes_on(prompts, tmp_path):
    FailsInIterationTwo.calls = 0
    config = tiny.tiny_config(
        prompts,
        output=str(tmp_path / "run"),
        grpo={"iterations": 3, "micro_batch_size": 8},
        reward={"weights": {name_of(FailsInIterationTwo): 1.0}, "failure_policy": "drop_group"},
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(write_config(config))
    commands.train(str(recipe), [])
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["dropped_groups"] for row in rows] == [0, 2, 0]
    assert [row["reward_mean"] is None for row in rows] == [False, True, False]
    assert [row["grad_norm"] == 0 for row in rows] == [False, True, False]


class AlwaysFails:
    def __call__(self, images, prompts, metadata) -> torch.Tensor:
        raise ConnectionError("the server is away")


def test_a_run_whose_reward_never_works_ends_with_empty_rewards(prompts, tmp_path):
    config = tiny.tiny_config(
        prompts,
        output=str(tmp_path / "run"),
        grpo={"iterations": 1},
        reward={"weights": {name_of(AlwaysFails): 1.0}, "failure_policy": "drop_group"},
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(write_config(config))
    commands.train(str(recipe), [])
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["eval_reward_before"] is None
    assert summary["eval_reward_after"] is None


def _train_on_an_enormous_reward(prompts: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Whether the update raised, and whether the weights are those from before."""
    BAD_PROMPTS.clear()
    BAD_PROMPTS.add(SECOND)
    grpo = {"advantage": "dr_grpo", "adv_clip": None, **sections.get("grpo", {})}
    config = tiny.tiny_config(
        prompts,
        **{**sections, "grpo": grpo, "reward": {"weights": {name_of(Enormous): 1.0}}},
    )
    experiment = tiny.start(config)
    before = tiny.weights(experiment)
    try:
        tiny.train(experiment, 1)
    except FloatingPointError as error:
        after = tiny.weights(experiment)
        same = all(torch.equal(before[name], after[name]) for name in before)
        return {"message": str(error), "same": same}
    return {"message": "", "same": False}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_that_is_not_finite_raises_on_every_rank_before_weights_change(
    run_ranks, prompts, layout
):
    """Placed locally, only one rank has the bad group."""
    for result in run_ranks(2, _train_on_an_enormous_reward, prompts, LAYOUTS[layout]):
        assert "gradient norm is" in result["message"] and "update 1" in result["message"]
        assert result["same"]


def test_weights_that_are_not_finite_stop_the_rollout_at_the_first_step(single_process, prompts):
    experiment = tiny.start(tiny.tiny_config(prompts))
    with torch.no_grad():
        next(experiment.policy.model.parameters()).fill_(math.nan)
    with pytest.raises(
        NotFiniteError, match=r"velocity of prompt .* in step 1 of 4 of iteration 1"
    ):
        tiny.first_gradient(experiment, "replay")


def test_weights_that_are_not_finite_are_not_evaluated(single_process, prompts):
    experiment = tiny.start(tiny.tiny_config(prompts))
    with torch.no_grad():
        next(experiment.policy.model.parameters()).fill_(math.nan)
    message = r"velocity of prompt \d+ sample 0.* is not finite in step 1 of 2 of an evaluation$"
    with pytest.raises(NotFiniteError, match=message):
        experiment.evaluator().run()


@pytest.mark.parametrize("schedule", ["replay", "retain"])
def test_a_velocity_that_is_no_number_is_named(single_process, prompts, schedule):
    draw = WaveRollout.draw

    def spoilt(self: WaveRollout, velocity: torch.Tensor, *more: Any) -> Any:
        # The last step, which nobody trains.
        if self.sampling.step == 3 and self.trajectory.wave.index == 1:
            velocity = velocity.detach().clone()
            velocity[2, 5, 0] = math.inf
        return draw(self, velocity, *more)

    experiment = tiny.start(tiny.tiny_config(prompts))
    batch = experiment.sampler.batch(0)
    with mock.patch.object(WaveRollout, "draw", spoilt), pytest.raises(NotFiniteError) as error:
        experiment.runner(schedule).run(0, batch)
    groups = [Group(i, prompt) for i, prompt in enumerate(batch)]
    slot = experiment.runner(schedule).place(groups, 0).waves[1].slots[2]
    assert str(error.value).startswith(
        f"velocity of prompt {slot.prompt_id} sample {slot.member} is not finite in step 4 of 4 of "
        "iteration 1's rollout"
    )
