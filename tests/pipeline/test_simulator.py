# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Orders run to their end with one message waiting a direction; a wrong order is a deadlock."""

import itertools
from dataclasses import replace

import pytest

from megatron_leangrpo.pipeline.order import SCHEDULES, phases, same_windows
from megatron_leangrpo.pipeline.simulator import DeadlockError, Timeline, simulate
from megatron_leangrpo.pipeline.times import StageTimes


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("trajectories", [1, 2, 3, 5, 8, 11])
def test_no_order_deadlocks_and_one_place_is_as_good_as_many(schedule, stages, trajectories):
    for window, ratio in itertools.product((1, 2, 3), (1.0, 2.0)):
        times = StageTimes.even(stages, ratio)
        windows = same_windows(trajectories, range(5), window)
        for phase in phases(schedule, stages, 6, windows):
            tight, roomy = (simulate(phase, times, capacity).makespan for capacity in (1, 100))
            if window == 1:
                assert tight == roomy
            else:
                assert tight <= 1.1 * roomy


def test_trajectories_that_train_steps_of_their_own_do_not_deadlock():
    windows = [[(0,), (4,)], [(1, 2, 3)], [], [(0, 1), (2,), (3, 4)]]
    for schedule, stages in itertools.product(SCHEDULES, (1, 2, 4, 6)):
        for phase in phases(schedule, stages, 6, windows):
            simulate(phase, StageTimes.even(stages))


def swapped(phase, stage: int, first: int, second: int):
    """The phase with two operations of one stage in the wrong order."""
    program = list(phase.programs[stage])
    program[first], program[second] = program[second], program[first]
    programs = list(phase.programs)
    programs[stage] = tuple(program)
    return replace(phase, programs=tuple(programs))


def test_an_order_that_differs_on_one_stage_is_a_deadlock_that_names_it():
    (phase,) = phases("reweight", 3, 3, same_windows(3, range(3)))
    with pytest.raises(DeadlockError, match="stage 1 waits before the forward of step 0 of traj"):
        simulate(swapped(phase, 1, 0, 1), StageTimes.even(3))


def test_a_backward_before_its_forward_is_a_deadlock():
    (phase,) = phases("reweight", 3, 3, same_windows(3, range(3)))
    with pytest.raises(DeadlockError, match="stage 2 waits before the backward of step 0"):
        simulate(swapped(phase, 2, 0, 1), StageTimes.even(3))


def test_a_step_before_the_ring_has_brought_it_is_a_deadlock():
    (phase,) = phases("rollout", 2, 2, same_windows(2, range(1)))
    wrong = swapped(swapped(phase, 0, 1, 2), 1, 1, 2)
    # Where both stages agree on step 1 of trajectory 0 before trajectory 1, it is only slower.
    slow, good = (simulate(p, StageTimes.even(2)).makespan for p in (wrong, phase))
    assert slow > good
    # But not before its own step 0.
    with pytest.raises(DeadlockError):
        simulate(swapped(phase, 1, 0, 2), StageTimes.even(2))


def test_forwards_that_run_too_far_ahead_fill_the_mailbox():
    (phase,) = phases("reweight", 2, 6, same_windows(2, range(6)))
    first = phase.programs[0]
    eager = tuple(sorted(first, key=lambda op: op.kind == "backward"))
    phase = replace(phase, programs=(eager, phase.programs[1]))
    with pytest.raises(DeadlockError, match="cannot hand over"):
        simulate(phase, StageTimes.even(2))
    simulate(phase, StageTimes.even(2), capacity=100)


def waits(timeline: Timeline, stage: int) -> list[float]:
    """Idle time between the operations of a stage."""
    pairs = itertools.pairwise(timeline.spans[stage])
    return [later.start - earlier.end for earlier, later in pairs]


@pytest.mark.parametrize(("stages", "trajectories"), [(2, 2), (4, 4), (4, 6), (8, 9)])
def test_with_enough_trajectories_a_filled_ring_waits_for_nothing(stages, trajectories):
    windows = same_windows(trajectories, range(6))
    rollout = simulate(phases("rollout", stages, 6, windows)[0], StageTimes.even(stages))
    assert all(waits(rollout, stage) == [0.0] * (6 * trajectories - 1) for stage in range(stages))
    reweight = simulate(phases("reweight", stages, 6, windows)[0], StageTimes.even(stages))
    # The last stage never waits, and the others not after their first backward came down.
    assert sum(waits(reweight, stages - 1)) == 0
    for stage in range(stages):
        steady = waits(reweight, stage)[2 * stages : -2 * stages]
        assert sum(steady) == 0
