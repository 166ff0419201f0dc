# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Step plans: the published selections, who shares a draw, and what is refused."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_leangrpo.diffusion.selection import (
    FirstFraction,
    ProgressiveWindow,
    RandomFraction,
    Window,
    build_step_selector,
)
from tests.vectors import VECTORS

CASES = VECTORS["trained_steps"]


def test_reference_has_the_expected_number_of_cases():
    assert len(CASES["flow_grpo"]) == 7
    assert len(CASES["dance"]) == 4
    assert len(CASES["mixgrpo_progressive"]["overlap_step1"]["windows"]) == 52
    assert len(CASES["mixgrpo_progressive"]["no_overlap"]["windows"]) == 16
    assert len(CASES["mixgrpo_exp_decay_iters"]["values"]) == 25


@pytest.mark.parametrize("case", CASES["flow_grpo"], ids=lambda case: str(case["num_steps"]))
def test_flow_grpo_trains_the_first_fraction(case):
    selector = FirstFraction(case["num_steps"], case["timestep_fraction"])
    plan = selector.plan(0, 0, 0, 0)
    assert list(plan.trained) == case["trained"]
    assert plan.stochastic == tuple(range(case["num_steps"]))
    assert selector.num_trained(0) == len(case["trained"])


@pytest.mark.parametrize("case", CASES["dance"], ids=lambda case: str(case["sampling_steps"]))
def test_dance_trains_a_random_fraction_of_all_but_the_last(case):
    num_steps = case["sampling_steps"]
    selector = RandomFraction(num_steps, case["timestep_fraction"])
    plans = [selector.plan(0, 0, 0, sample) for sample in range(400)]
    assert selector.num_trained(0) == case["trained_per_sample"]
    assert {len(set(plan.trained)) for plan in plans} == {case["trained_per_sample"]}
    assert all(list(plan.trained) == sorted(plan.trained) for plan in plans)
    assert all(plan.stochastic == tuple(range(num_steps)) for plan in plans)
    chosen = Counter(step for plan in plans for step in plan.trained)
    assert set(chosen) == set(range(case["transitions_kept"]))
    # every step is as likely: 5 standard deviations of a binomial around its mean
    share = case["trained_per_sample"] / case["transitions_kept"]
    spread = 5 * (400 * share * (1 - share)) ** 0.5
    assert all(abs(count - 400 * share) < spread for count in chosen.values())


def test_flow_grpo_fast_window_has_the_published_starts():
    case = CASES["flow_grpo_fast_window"]
    low, high = case["range"]
    starts = tuple(range(low, high - case["size"] + 1))
    assert list(starts) == case["possible_starts"]
    plan = Window(6, case["size"], starts).plan(0, 0, 0, 0)
    assert plan.trained == plan.stochastic == (0, 1, 2)


@pytest.mark.parametrize(("name", "stride"), [("overlap_step1", 1), ("no_overlap", 4)])
def test_mixgrpo_window_slides_as_published_but_is_never_empty(name, stride):
    case = CASES["mixgrpo_progressive"][name]
    selector = ProgressiveWindow(
        num_steps=case["max_timesteps"] + 2,
        window_size=case["group_size"],
        window_interval=case["iters_per_group"],
        window_stride=stride,
    )
    empty = [i for i, window in enumerate(case["windows"]) if not window]
    assert empty == case["empty_at"]
    published = [tuple(window) for window in case["windows"] if window]
    ours = [selector.plan(0, iteration, 7, 3).trained for iteration in range(len(published))]
    assert ours == published
    assert all(selector.num_trained(i) == len(window) for i, window in enumerate(published))


def test_mixgrpo_decaying_stays_are_the_published_ones():
    case = CASES["mixgrpo_exp_decay_iters"]
    selector = ProgressiveWindow(
        num_steps=25,
        window_interval=case["iters_per_group"],
        window_decay=case["k"],
        window_decay_start=case["thre"],
    )
    assert [selector.iterations_at(start) for start in range(25)] == case["values"]
    starts = [selector.window(i)[0] for i in range(sum(case["values"][:23]) + 1)]
    assert Counter(starts[:-1]) == dict(enumerate(case["values"][:23]))
    assert starts == [*sorted(starts[:-1]), 0]


SELECTORS = {
    "first": FirstFraction(8),
    "random-sample": RandomFraction(8),
    "random-group": RandomFraction(8, scope="group"),
    "random-iteration": RandomFraction(8, scope="iteration"),
    "window-group": Window(8, 3, (0, 1, 2)),
    "window-iteration": Window(8, 3, (0, 1, 2), scope="iteration"),
    "progressive": ProgressiveWindow(8, window_interval=2),
}


def reseed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("name", SELECTORS)
def test_a_plan_depends_on_its_arguments_alone(name):
    selector = SELECTORS[name]

    def plans():
        return [
            selector.plan(seed, iteration, prompt, sample)
            for seed in range(2)
            for iteration in range(3)
            for prompt in range(3)
            for sample in range(3)
        ]

    reseed_everything(1)
    first = plans()
    reseed_everything(2)
    assert plans() == first
    for plan in first:
        assert set(plan.trained) <= set(plan.stochastic)
        assert 7 not in plan.trained


@pytest.mark.parametrize(
    ("name", "differs_by"),
    [
        ("random-sample", {"seed", "iteration", "prompt", "sample"}),
        ("random-group", {"seed", "iteration", "prompt"}),
        ("random-iteration", {"seed", "iteration"}),
        ("window-group", {"seed", "iteration", "prompt"}),
        ("window-iteration", {"seed", "iteration"}),
    ],
)
def test_a_draw_is_shared_exactly_within_its_scope(name, differs_by):
    selector = SELECTORS[name]
    names = ("seed", "iteration", "prompt", "sample")
    for position, argument in enumerate(names):
        arguments = [[5, 6, 7, 8] for _ in range(40)]
        for value, row in enumerate(arguments):
            row[position] = value
        distinct = {selector.plan(*row).trained for row in arguments}
        assert (len(distinct) > 1) == (argument in differs_by)


def test_every_window_start_is_drawn():
    selector = SELECTORS["window-group"]
    starts = Counter(selector.plan(0, 0, prompt, 0).trained[0] for prompt in range(300))
    assert set(starts) == {0, 1, 2}
    assert min(starts.values()) > 60


@given(
    num_steps=st.integers(3, 60),
    size=st.integers(1, 60),
    interval=st.integers(1, 5),
    stride=st.integers(1, 8),
    iteration=st.integers(0, 10_000),
)
@settings(max_examples=80, deadline=None)
def test_progressive_windows_are_contiguous_and_leave_the_end_alone(
    num_steps, size, interval, stride, iteration
):
    size = min(size, num_steps - 2)
    window = ProgressiveWindow(num_steps, size, interval, stride).window(iteration)
    assert 1 <= len(window) <= size
    assert window == tuple(range(window[0], window[-1] + 1))
    assert window[0] >= 0 and window[-1] < num_steps - 2


def test_selectors_are_built_by_name_with_their_defaults():
    assert build_step_selector("first_fraction", 6) == FirstFraction(6, 0.99)
    assert build_step_selector("random_fraction", 16, scope=None) == RandomFraction(16, 0.6)
    built = build_step_selector("window", 8, window_size=3, window_starts=[0, 1, 2])
    assert built == Window(8, 3, (0, 1, 2))
    assert build_step_selector("progressive", 25, window_stride=4).window_stride == 4


@pytest.mark.parametrize(
    ("name", "num_steps", "options", "setting"),
    [
        ("all", 8, {}, "sampling.step_selection"),
        ("first_fraction", 0, {}, "sampling.num_steps"),
        ("first_fraction", 1, {}, "sampling.timestep_fraction"),
        ("first_fraction", 8, {"timestep_fraction": 1.0}, "sampling.timestep_fraction"),
        ("first_fraction", 8, {"timestep_fraction": 1.5}, "sampling.timestep_fraction"),
        ("first_fraction", 8, {"timestep_fraction": float("nan")}, "sampling.timestep_fraction"),
        ("first_fraction", 8, {"window_size": 2}, "sampling.window_size"),
        ("random_fraction", 2, {}, "sampling.timestep_fraction"),
        ("random_fraction", 8, {"scope": "rank"}, "sampling.selection_scope"),
        ("window", 8, {"window_starts": [0]}, "sampling.window_size"),
        ("window", 8, {"window_size": 3}, "sampling.window_starts"),
        ("window", 8, {"window_size": 3, "window_starts": []}, "sampling.window_starts"),
        ("window", 8, {"window_size": 3, "window_starts": [5]}, "sampling.window_starts"),
        ("window", 8, {"window_size": 8, "window_starts": [0]}, "sampling.window_size"),
        (
            "window",
            8,
            {"window_size": 3, "window_starts": [0], "scope": "sample"},
            "sampling.selection_scope",
        ),
        ("progressive", 4, {}, "sampling.window_size"),
        ("progressive", 8, {"window_interval": 0}, "sampling.window_interval"),
        ("progressive", 8, {"window_stride": 0}, "sampling.window_stride"),
        ("progressive", 8, {"window_decay": -1.0}, "sampling.window_decay"),
        ("progressive", 8, {"scope": "group"}, "sampling.selection_scope"),
    ],
)
def test_bad_settings_are_named(name, num_steps, options, setting):
    with pytest.raises(ValueError, match=setting):
        build_step_selector(name, num_steps, **options)
