# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Reweight gives replay's gradient, whatever the convention and the trajectories on a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_leangrpo import platform
from tests.grpo import tiny

# Per tensor in float64. In float32 a moment and its shift round where replay has one product; the
# bound holds for the whole gradient.
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
TWO_REWARDS = {"reward": {"weights": {tiny.SMOOTH: 1.0, tiny.CENTRE: 0.5}}}
# Without `grpo.group_size` a group has 4 members: 4 on one rank, 2 on each of two with `spread`.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "one trajectory of a group on each of two ranks": {"grpo": {"group_size": 2}},
    "several trajectories of a group": {"grpo": {"placement": "local"}},
    "three trajectories of a group": {"grpo": {"group_size": 3, "placement": "local"}},
    "four groups of two": {
        "grpo": {"prompts_per_iteration": 4, "group_size": 2, "placement": "local"}
    },
    "eight trajectories of a group": {"grpo": {"group_size": 8, "placement": "local"}},
    "std of all groups": {"grpo": {"advantage": "flow_grpo_global_std"}},
    "mean and std of all groups": {"grpo": {"advantage": "dance_global"}},
    "leave one out": {"grpo": {"advantage": "leave_one_out"}},
    "clipped advantages are replayed": {"grpo": {"adv_clip": 0.5}},
    "clipped advantages, std of all groups": {
        "grpo": {"adv_clip": 0.5, "advantage": "flow_grpo_global_std"}
    },
    "sum of rewards": {**TWO_REWARDS, "grpo": {"reward_combination": "reward_sum"}},
    "sum of advantages": {**TWO_REWARDS, "grpo": {"reward_combination": "advantage_sum"}},
    "GDPO": {**TWO_REWARDS, "grpo": {"reward_combination": "gdpo"}},
    "KL": {"grpo": {"kl_beta": 0.5, "kl_form": "velocity_mse"}},
    "GRPO-Guard, a random fraction for each sample, recomputation": {
        "model": {"recompute_granularity": "full"},
        "sampling": {"step_selection": "random_fraction", "num_steps": 4, "timestep_fraction": 0.7},
        "grpo": {"ratio_norm": "grpo_guard"},
    },
    "two updates, the first of them": {"grpo": {"updates_per_rollout": 2}},
    "videos by two experts, guided, KL": tiny.merged(
        tiny.WAN,
        {
            "model": {"preset": "wan_smallest_experts"},
            "sampling": {"num_steps": 4, "cfg_scale": 4.0, "cfg_forwards": "separate"},
            "grpo": {"kl_beta": 0.5, "kl_form": "exact"},
        },
    ),
}


def _errors(
    prompts: str, dtype: str, tensor_parallel: int, cases: list[str]
) -> dict[str, tuple[float, float]]:
    """By case: relative L2 of the worst tensor and of the whole gradient, against replay."""
    errors = {}
    for case in cases:
        sections = {name: dict(values) for name, values in CASES[case].items()}
        sections["model"] = {"dtype": dtype, **sections.get("model", {})}
        sections["parallel"] = {"tensor_model_parallel_size": tensor_parallel}
        sections["sampling"] = {"num_steps": 3, **sections.get("sampling", {})}
        sections["grpo"] = {**sections.get("grpo", {}), "micro_batch_size": 1}
        experiment = tiny.start(tiny.tiny_config(prompts, **sections))
        if experiment.reference is not None:
            tiny.move_away_from_reference(experiment)
        replay, expected = tiny.first_gradient(experiment, "replay")
        reweight, metrics = tiny.first_gradient(experiment, "reweight")
        assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
        for name in ("policy_loss", "kl", "clip_fraction"):
            # Sums of rounded float32 values, around a mean that may be zero.
            assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), (case, name)
        whole = [torch.cat([g[n].flatten() for n in replay]) for g in (reweight, replay)]
        errors[case] = (tiny.worst(reweight, replay)[0], tiny.relative_l2(*whole))
    return errors


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    return tiny.write_prompts(tmp_path_factory.mktemp("prompts"), count=4)


def _check(errors: dict[str, tuple[float, float]], dtype: str) -> None:
    for case, (by_tensor, whole) in errors.items():
        error = by_tensor if dtype == "float64" else whole
        assert error <= TOLERANCE[dtype], (case, error)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_in_one_process_reweight_gives_the_gradient_of_replay(prompts, dtype):
    errors = _errors(prompts, dtype, 1, list(CASES))
    platform.destroy_distributed()
    _check(errors, dtype)


# World size, tensor-parallel size, cases.
LAYOUTS = {
    "dp 2": (
        2,
        1,
        [
            "one trajectory of a group on each of two ranks",
            "several trajectories of a group",
            "clipped advantages, std of all groups",
            "sum of advantages",
            "two updates, the first of them",
        ],
    ),
    "tp 2": (
        2,
        2,
        ["eight trajectories of a group", "KL", "videos by two experts, guided, KL"],
    ),
    "dp 4": (4, 1, ["sum of rewards", "four groups of two"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout_reweight_gives_the_gradient_of_replay(run_ranks, prompts, layout):
    world, tensor_parallel, cases = LAYOUTS[layout]
    for errors in run_ranks(world, _errors, prompts, "float64", tensor_parallel, cases):
        _check(errors, "float64")


def test_a_constant_group_adds_nothing_and_every_rank_ends(run_ranks, prompts):
    for gradient_is_zero in run_ranks(2, _constant_groups, prompts):
        assert gradient_is_zero


def _constant_groups(prompts: str) -> bool:
    config = tiny.tiny_config(
        prompts,
        reward={"weights": {"tests.grpo.test_reweight:ConstantReward": 1.0}},
        grpo={"micro_batch_size": 1},
    )
    gradient, _ = tiny.first_gradient(tiny.start(config), "reweight")
    return all(not tensor.any() for tensor in gradient.values())


class ConstantReward:
    """The same for every picture."""

    def __call__(self, images, prompts, metadata) -> torch.Tensor:
        return torch.full((len(images),), 0.7, dtype=torch.float64)


def test_several_trajectories_in_one_backward_are_refused(prompts):
    experiment = tiny.start(tiny.tiny_config(prompts, grpo={"micro_batch_size": 2}))
    with pytest.raises(ValueError, match="reweight needs 1"):
        experiment.runner("reweight")
    platform.destroy_distributed()
