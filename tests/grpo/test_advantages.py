# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Advantage conventions against the reference numbers, and the traps around them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_leangrpo.grpo.advantages import (
    CONVENTIONS,
    combine_advantages,
    compute_advantages,
    finite_groups,
    needs_all_groups,
)
from tests.vectors import VECTORS, tensor

CASES = {case["id"]: case for case in VECTORS["advantages"]["cases"]}
NAMES = {
    "flow_grpo_global_std": "flow_grpo_global_std",
    "flow_grpo_per_prompt_std": "flow_grpo_group_std",
    "dance_group": "dance_group",
    "dance_global": "dance_global",
    "verl_omni_global_std": "verl_omni_global_std",
    "verl_omni_group_std": "verl_omni_group_std",
    "mean_only_dr_grpo": "dr_grpo",
    "flow_factory_sum": "flow_factory",
    "clipped5_dance_group": "dance_group",
}
GROUP_CONVENTIONS = [name for name, rule in CONVENTIONS.items() if rule.baseline == "group"]


def ids_of(letters) -> torch.Tensor:
    return torch.tensor([ord(letter) for letter in letters])


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-13)


def affine(result):
    return ((result.rewards - result.baseline) / result.denominator).sum(0)


def test_every_reference_case_and_convention_is_covered():
    assert len(CASES) == 6
    assert all(set(case["advantages"]) == set(NAMES) for case in CASES.values())
    assert set(NAMES.values()) | {"leave_one_out"} == set(CONVENTIONS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_convention_equals_the_reference(case, name):
    case = CASES[case]
    result = compute_advantages(tensor(case["rewards"]), ids_of(case["group_ids"]), NAMES[name])
    values = result.values.clamp(-5, 5) if name.startswith("clipped5") else result.values
    # null marks upstream's NaN of a group of one, whose required value is 0
    expected = [0.0 if value is None else value for value in case["advantages"][name]]
    close(values, tensor(expected))
    close(affine(result), result.values)


@pytest.mark.parametrize(
    ("key", "convention", "combination"),
    [
        ("reward_sum_then_group_ddof1_1e8", "dance_group", "reward_sum"),
        ("advantage_sum_mixgrpo", "dance_group", "advantage_sum"),
        ("gdpo_combined", "flow_factory", "advantage_sum"),
        ("gdpo_final", "flow_factory", "gdpo"),
    ],
)
def test_several_rewards_equal_the_reference(key, convention, combination):
    case = VECTORS["multi_reward"]
    rewards = tensor([case["rewards_A"], case["rewards_B"]])
    ids = ids_of(case["group_ids"])
    result = combine_advantages(rewards, case["weights"], ids, convention, combination)
    close(result.values, tensor(case[key]))
    close(affine(result), result.values)


def test_leave_one_out_compares_with_the_mean_of_the_others():
    rewards, ids = tensor([0.1, 0.4, 0.9, 5.0, 7.0, 3.0]), torch.tensor([0, 0, 0, 1, 1, 2])
    result = compute_advantages(rewards, ids, "leave_one_out")
    close(result.values, tensor([0.1 - 0.65, 0.4 - 0.5, 0.9 - 0.25, -2.0, 2.0, 0.0]))
    close(affine(result), result.values)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("row", VECTORS["advantages"]["float32_constant_reward_trap"]["rows"])
def test_a_constant_batch_is_exactly_zero(row, dtype, convention):
    rewards = torch.full((row["n"],), row["constant"], dtype=dtype)
    ids = torch.arange(row["n"]) % 2
    result = compute_advantages(rewards, ids, convention)
    assert result.values.dtype == torch.float64
    assert torch.equal(result.values, torch.zeros(row["n"], dtype=torch.float64))


@pytest.mark.parametrize("convention", GROUP_CONVENTIONS)
def test_a_constant_group_beside_others_is_exactly_zero(convention):
    rewards = torch.tensor([0.1, 0.7] * 12 + [0.3] * 24, dtype=torch.float32)
    ids = torch.cat([torch.arange(24) % 4, torch.full((24,), 9)])
    result = compute_advantages(rewards, ids, convention)
    assert torch.equal(result.values[24:], torch.zeros(24, dtype=torch.float64))
    assert result.denominator[0, 24:].isinf().all()


@pytest.mark.parametrize("combination", ["reward_sum", "advantage_sum", "gdpo"])
def test_a_constant_group_of_several_rewards_is_exactly_zero(combination):
    rewards = tensor([[0.1, 0.1, 0.1, 0.2, 0.5], [0.7, 0.7, 0.7, 0.3, 0.1]])
    ids = torch.tensor([4, 4, 4, 5, 5])
    result = combine_advantages(rewards, [0.3, 0.6], ids, "flow_factory", combination)
    assert result.values[:3].tolist() == [0.0, 0.0, 0.0]
    assert (result.values[3:] != 0).all()


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_group_of_one_is_finite(convention):
    rewards, ids = tensor([0.2, 0.8, 0.5]), torch.tensor([0, 0, 1])
    values = compute_advantages(rewards, ids, convention).values
    assert values.isfinite().all()
    alone = compute_advantages(tensor([0.5]), torch.tensor([3]), convention).values
    assert alone.tolist() == [0.0]


@given(
    rewards=st.lists(st.floats(-50, 50), min_size=2, max_size=24),
    groups=st.integers(1, 5),
    convention=st.sampled_from(sorted(CONVENTIONS)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_advantages_follow_their_samples_in_any_order_bit_for_bit(
    rewards, groups, convention, seed
):
    rng = torch.Generator().manual_seed(seed)
    rewards = tensor(rewards)
    ids = torch.randint(groups, rewards.shape, generator=rng)
    order = torch.randperm(len(rewards), generator=rng)
    straight = compute_advantages(rewards, ids, convention).values
    assert torch.equal(
        compute_advantages(rewards[order], ids[order], convention).values, straight[order]
    )
    # group ids are names, not positions
    assert torch.equal(compute_advantages(rewards, 1000 - 7 * ids, convention).values, straight)


def test_large_group_ids_are_told_apart():
    ids = torch.tensor([2**24, 2**24 + 1, 2**24, 2**24 + 1])
    values = compute_advantages(tensor([1.0, 5.0, 2.0, 5.0]), ids, "dr_grpo").values
    assert values.tolist() == [-0.5, 0.0, 0.5, 0.0]
    with pytest.raises(AssertionError):
        compute_advantages(tensor([1.0, 5.0]), torch.tensor([1.0, 2.0]), "dr_grpo")


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_dropped_samples_are_zero_and_leave_no_trace(convention):
    rewards = tensor([0.1, 0.4, 0.25, 1e9, float("nan"), 0.9, 0.6, 0.2])
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    keep = finite_groups(rewards, ids)
    assert keep.tolist() == [True] * 3 + [False] * 2 + [True] * 3
    result = compute_advantages(rewards, ids, convention, keep)
    assert result.values[~keep].tolist() == [0.0, 0.0]
    assert torch.equal(
        result.values[keep], compute_advantages(rewards[keep], ids[keep], convention).values
    )
    everything = compute_advantages(rewards, ids, convention, torch.zeros(8, dtype=torch.bool))
    assert everything.values.tolist() == [0.0] * 8


@pytest.mark.parametrize("combination", ["reward_sum", "advantage_sum", "gdpo"])
def test_a_group_is_dropped_if_any_of_its_rewards_is_not_finite(combination):
    rewards = tensor([[0.1, 0.4, 0.3, 0.9], [float("inf"), 0.2, 0.8, 0.1]])
    ids = torch.tensor([0, 0, 1, 1])
    keep = finite_groups(rewards, ids)
    assert keep.tolist() == [False, False, True, True]
    result = combine_advantages(rewards, [1.0, 0.5], ids, "dance_group", combination, keep)
    alone = combine_advantages(rewards[:, 2:], [1.0, 0.5], ids[2:], "dance_group", combination)
    assert result.values[:2].tolist() == [0.0, 0.0]
    assert torch.equal(result.values[2:], alone.values)
    assert affine(result).isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_reward_is_refused_with_its_place(bad):
    with pytest.raises(ValueError, match=f"{bad} at sample 2 of group 8"):
        compute_advantages(tensor([0.1, 0.2, bad]), torch.tensor([7, 7, 8]), "dance_group")


@pytest.mark.parametrize("combination", ["reward_sum", "advantage_sum", "gdpo"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_needs_all_groups_says_whether_other_groups_change_an_advantage(convention, combination):
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    values = []
    for other in (0.3, 50.0):
        rewards = tensor([[0.1, 0.5, 0.3, 0.2, 0.9, other], [3.0, 1.0, 2.0, 5.0, 6.0, 9.0]])
        result = combine_advantages(rewards, [1.0, 0.5], ids, convention, combination)
        values.append(result.values[:3])
    assert torch.equal(*values) == (not needs_all_groups(convention, combination))


def test_unknown_names_are_refused():
    rewards, ids = tensor([0.1, 0.2]), torch.tensor([0, 0])
    with pytest.raises(ValueError, match=r"grpo.advantage='zscore'"):
        compute_advantages(rewards, ids, "zscore")
    with pytest.raises(ValueError, match=r"grpo.reward_combination='mean'"):
        combine_advantages(rewards[None], [1.0], ids, "dance_group", "mean")
