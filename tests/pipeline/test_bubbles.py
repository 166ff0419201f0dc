# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Closed forms of the bubble agree with the simulated order."""

import random

import pytest

from megatron_leangrpo.pipeline.bubbles import (
    bubble,
    few_trajectories,
    phase_times,
    stepwise_rollout,
    waiting,
)
from megatron_leangrpo.pipeline.order import SCHEDULES, phases, same_windows
from megatron_leangrpo.pipeline.simulator import simulate, simulate_all
from megatron_leangrpo.pipeline.times import StageTimes


def random_settings(count: int, enough: bool):
    """Stages, trajectories, steps, trained steps and times, with at least as many trajectories as
    stages or fewer."""
    draw = random.Random(5)
    while count:
        stages, trajectories = draw.choice((1, 2, 3, 4, 6, 8)), draw.choice((1, 2, 3, 4, 6, 8, 12))
        if (trajectories >= stages) != enough:
            continue
        count -= 1
        steps = draw.randint(4, 10)
        trained = draw.choice((steps, steps - 1, steps // 2))
        uneven, ratio = draw.choice((0.0, 0.1, 0.25)), draw.choice((1.0, 2.0, 3.0))
        forward = tuple(draw.uniform(1 - uneven, 1 + uneven) for _ in range(stages))
        backward = tuple(f * ratio * draw.uniform(1 - uneven / 3, 1 + uneven / 3) for f in forward)
        yield trajectories, steps, trained, StageTimes(forward, backward, draw.choice((0.0, 0.03)))


def differences(enough: bool, count: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
    for trajectories, steps, trained, times in random_settings(count, enough):
        for schedule in SCHEDULES:
            windows = same_windows(trajectories, range(trained))
            played = simulate_all(phases(schedule, times.stages, steps, windows), times)[1]
            predicted = bubble(schedule, times, trajectories, steps, trained)
            found[schedule].append(abs(predicted - played))
    return found


# Exact where no backward interrupts the forwards.
EXACT = {"rollout": 1e-9, "retain": 1e-9}


def test_with_enough_trajectories_all_bubbles_are_those_of_the_simulation():
    for schedule, found in differences(enough=True, count=80).items():
        assert max(found) <= EXACT.get(schedule, 0.02), schedule


def test_with_too_few_trajectories_they_are_too_but_for_reweight():
    found = differences(enough=False, count=80)
    # Whose last steps are not trained has longer paths than those that are counted.
    assert max(found.pop("reweight")) <= 0.04
    for schedule, own in found.items():
        assert max(own) <= EXACT.get(schedule, 0.02), schedule


@pytest.mark.parametrize("enough", [True, False])
def test_what_is_planned_with_is_within_two_points_of_the_simulation(enough):
    for trajectories, steps, trained, times in random_settings(25, enough):
        last_steps = [(step,) for step in range(steps - trained, steps)]
        for schedule in SCHEDULES:
            for own in (*same_windows(1, range(trained), 3), last_steps):
                played = simulate_all(
                    phases(schedule, times.stages, steps, [own] * trajectories), times
                )[1]
                predicted = waiting(schedule, times, trajectories, steps, own)
                assert predicted == pytest.approx(played, abs=0.02), (schedule, own)


def test_the_ring_fills_the_pipeline_once_where_others_fill_it_at_every_step():
    stages, trajectories, steps = 4, 4, 10
    times = StageTimes.even(stages)
    ring = bubble("rollout", times, trajectories, steps, 0)
    stepwise = 1 - trajectories * steps * stages / (
        stages * stepwise_rollout(times, trajectories, steps)
    )
    assert ring == pytest.approx(3 / 43) and ring <= 0.1
    assert stepwise == pytest.approx(3 / 7)
    # Played: a step at a time, with the whole pipeline empty in between.
    (one_step,) = phases("rollout", stages, 1, same_windows(trajectories, ()))
    played = steps * simulate(one_step, times).makespan
    assert played == stepwise_rollout(times, trajectories, steps)


def test_large_pipelines_are_played_too():
    times = StageTimes.even(16)
    windows = same_windows(64, range(3))
    (phase,) = phases("reweight", 16, 4, windows)
    (predicted,) = phase_times("reweight", times, 64, 4, 3)
    assert simulate(phase, times).makespan == pytest.approx(predicted, rel=0.01)


def test_too_few_trajectories_are_told_with_what_they_cost():
    text = few_trajectories("replay", 4, 8, 2, 10)
    assert text is not None and "2 trajectories are in flight on 4 pipeline stages" in text
    assert "29%" in text and "7%" in text
    assert few_trajectories("replay", 4, 8, 4, 10) is None
    # Four and two: (4 + 2) / (4 / 0.925 + 2 / 0.71).
    text = few_trajectories("replay", 4, 6, 4, 10)
    assert text is not None and "the last 2 of 6 trajectories are in flight on 4 pipeline" in text
    assert "wait for 16% of the time" in text
    # 2 of 402 are not worth a word.
    assert few_trajectories("replay", 4, 402, 4, 10) is None
