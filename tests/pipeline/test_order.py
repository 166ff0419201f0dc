# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Orders run everything once, keep what the formula says, and alternate in steady state."""

import itertools

import pytest

from megatron_leangrpo.pipeline.order import (
    SCHEDULES,
    Item,
    ends_of,
    graphs_in_flight,
    most_kept,
    phases,
    same_windows,
)

SIZES = [(1, 3), (2, 1), (2, 5), (3, 3), (4, 2), (4, 4), (4, 7), (8, 3)]
STEPS, TRAINED = 7, 6


def names(program) -> str:
    """A program as text: F and B with step and trajectory."""
    return " ".join(f"{op.kind[0].upper()}{op.item.step}{op.item.trajectory}" for op in program)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "trajectories"), SIZES)
@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_every_stage_runs_every_item_once(schedule, stages, trajectories, window):
    windows = same_windows(trajectories, range(TRAINED), window)
    ends = {Item(t, m) for m, own in enumerate(windows) for w in own for t in ends_of(w)}
    rollout = {Item(t, m) for t in range(STEPS) for m in range(trajectories)}
    found = phases(schedule, stages, STEPS, windows)
    for stage in range(stages):
        done = [op for phase in found for op in phase.programs[stage]]
        forwards = [op.item for op in done if op.kind == "forward"]
        backwards = [op.item for op in done if op.kind == "backward"]
        replayed = sorted(ends) if schedule == "replay" else []
        assert sorted(forwards) == sorted([*rollout, *replayed])
        assert sorted(backwards) == sorted(ends if schedule != "rollout" else [])
        kept = [op.item for op in done if op.keeps]
        assert sorted(kept) == sorted(backwards)
        for item in backwards:
            last = max(n for n, op in enumerate(done) if op.kind == "forward" and op.item == item)
            assert last < next(
                n for n, op in enumerate(done) if op.kind == "backward" and op.item == item
            )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "trajectories"), SIZES)
@pytest.mark.parametrize("window", [1, 2, 3])
def test_graphs_in_flight_are_the_formulas(schedule, stages, trajectories, window):
    if schedule == "reweight" and window > 1 and trajectories < stages:
        pytest.skip("no formula")
    windows = same_windows(trajectories, range(TRAINED), window)
    found = phases(schedule, stages, STEPS, windows)
    for stage in range(stages):
        counted = max(most_kept(phase.programs[stage]) for phase in found)
        formula = graphs_in_flight(schedule, stages, stage, trajectories, TRAINED, window)
        assert counted == formula


def test_reweight_alternates_from_the_first_step_on():
    (phase,) = phases("reweight", 2, 2, same_windows(2, range(2)))
    first, last = phase.programs
    assert names(last) == "F00 B00 F01 B01 F10 B10 F11 B11"
    assert names(first) == "F00 F01 B00 F10 B01 F11 B10 B11"


def test_a_window_runs_its_later_end_first_and_its_earlier_end_after_the_next_forward():
    (phase,) = phases("reweight", 1, 4, same_windows(1, range(3), 3))
    assert names(phase.programs[0]) == "F00 F10 F20 B20 F30 B00"


def test_retain_runs_its_backwards_newest_first_on_all_stages():
    forward, backward = phases("retain", 2, 3, same_windows(2, range(2)))
    assert forward.ring and not backward.ring
    assert [names(program) for program in backward.programs] == ["B11 B10 B01 B00"] * 2


def test_replay_has_no_ring():
    rollout, update = phases("replay", 3, 4, same_windows(2, range(3)))
    assert rollout.ring and not update.ring
    assert names(update.programs[2]).startswith("F21 B21 F20 B20")


@pytest.mark.parametrize(("stages", "trajectories"), SIZES)
def test_in_steady_state_every_stage_alternates(stages, trajectories):
    (phase,) = phases("reweight", stages, STEPS, same_windows(trajectories, range(STEPS)))
    for stage, program in enumerate(phase.programs):
        lag = min(stages - 1 - stage, STEPS * trajectories)
        kinds = [op.kind for op in program]
        steady = kinds[lag : len(kinds) - lag]
        assert kinds[:lag] == ["forward"] * lag
        assert kinds[len(kinds) - lag :] == ["backward"] * lag
        assert all(a != b for a, b in itertools.pairwise(steady))
