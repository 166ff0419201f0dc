# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Alarms come when a run has stopped learning, once, and not in a healthy one."""

from __future__ import annotations

import random

from megatron_leangrpo.operations.alarms import WINDOW, Alarms


def healthy(iteration: int, rng: random.Random) -> dict[str, float]:
    return {
        "reward_mean": 0.5 + 0.01 * iteration + rng.gauss(0, 0.03),
        "grad_norm": rng.uniform(0.5, 2.0),
        "zero_std_ratio": 0.1,
    }


def test_a_healthy_run_raises_none():
    for seed in range(20):
        rng, alarms = random.Random(seed), Alarms()
        assert not any(alarms.check(healthy(n, rng)) for n in range(40))


def test_groups_without_signal_are_told_once_and_again_when_they_come_back():
    alarms, rng = Alarms(), random.Random(0)
    said = [alarms.check({**healthy(n, rng), "zero_std_ratio": 0.95}) for n in range(2 * WINDOW)]
    assert [len(messages) for messages in said] == [0] * (WINDOW - 1) + [1] + [0] * WINDOW
    assert "95% of the groups" in said[WINDOW - 1]["constant"]
    alarms.check(healthy(0, rng))
    again = [alarms.check({**healthy(n, rng), "zero_std_ratio": 1.0}) for n in range(WINDOW)]
    assert len(again[-1]) == 1


def test_a_spike_of_the_gradient_norm_is_compared_with_the_usual_one():
    alarms, rng = Alarms(), random.Random(1)
    for n in range(10):
        alarms.check(healthy(n, rng))
    found = alarms.check({**healthy(10, rng), "grad_norm": 100.0})
    assert list(found) == ["spike"] and found["spike"].startswith("the gradient norm is 100, ")
    assert alarms.check(healthy(11, rng)) == {}


def test_a_reward_that_falls_and_stays_down_is_a_collapse():
    alarms, rng = Alarms(), random.Random(2)
    for n in range(20):
        assert alarms.check(healthy(n, rng)) == {}
    said = [alarms.check({**healthy(n, rng), "reward_mean": 0.1}) for n in range(20, 30)]
    assert (
        sum(map(len, said)) == 1 and "the reward has fallen" in next(filter(None, said))["collapse"]
    )


def test_metrics_that_are_missing_or_no_numbers_raise_none():
    alarms = Alarms()
    for _ in range(10):
        assert alarms.check({"reward_mean": None, "grad_norm": float("nan")}) == {}


def test_a_resumed_run_remembers_what_came_before_but_not_before_its_last_rollback():
    rng = random.Random(3)
    rows = [healthy(n, rng) for n in range(20)]
    low = {**healthy(0, rng), "reward_mean": 0.1}
    for known in (rows, [{**row, "rollbacks": 1} for row in rows]):
        alarms = Alarms.after(known, known[0].get("rollbacks", 0))
        assert any(alarms.check(low) for _ in range(WINDOW))
    # It went back after the last of these iterations.
    alarms = Alarms.after(rows, 1)
    assert not any(alarms.check(low) for _ in range(WINDOW))
