# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Stages on real ranks give the latents and gradients of the model in one piece."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_leangrpo.pipeline.order import most_kept, phases, same_windows
from megatron_leangrpo.pipeline.simulator import simulate
from megatron_leangrpo.pipeline.times import StageTimes
from megatron_leangrpo.pipeline.transport import Alone, StageTransport
from tests.pipeline.toy import STEPS, reference, run_clocked, run_stage

TRAINED = 4
# Fewer trajectories than stages, and more.
TRAJECTORIES = (2, 5)
# The ranks of a world of four as pipelines: side by side, or with a rank to spare.
LAYOUTS = {
    2: {"groups": [[0, 1], [2, 3]], "split": (4, 2)},
    3: {"groups": [[0, 1, 2], [3]], "split": (1, 2, 3)},
    4: {"groups": [[0, 1, 2, 3]], "split": (1, 3, 1, 1)},
}
CASES = [
    (schedule, trajectories, window)
    for schedule in ("rollout", "replay", "retain", "reweight")
    for trajectories in TRAJECTORIES
    for window in ((1, 3) if schedule != "rollout" else (1,))
]


def windows_of(trajectories: int, window: int):
    """One trajectory trains other steps than the rest."""
    own = list(same_windows(trajectories, range(TRAINED), window))
    own[1] = [(1,), (3, 4)]
    return own


def _transport(stages: int) -> StageTransport:
    layout = LAYOUTS[stages]
    groups = [dist.new_group(ranks) for ranks in layout["groups"]]
    group = next(g for g, ranks in zip(groups, layout["groups"]) if dist.get_rank() in ranks)
    return StageTransport(group, timeout_seconds=60)


def _run_all(stages: int) -> list[dict]:
    layout, transport = LAYOUTS[stages], _transport(stages)
    if transport.stages != stages:
        return []
    return [
        run_stage(transport, layout["split"], schedule, windows_of(m, window))
        for schedule, m, window in CASES
    ]


@pytest.fixture(scope="module")
def results(run_ranks):
    """What every stage computed, by number of stages; each pipeline runs once."""
    known: dict[int, list] = {1: [_run_alone()]}

    def of(stages: int) -> list:
        if stages not in known:
            known[stages] = run_ranks(4, _run_all, stages)
        return known[stages]

    return of


def _run_alone() -> list[dict]:
    return [
        run_stage(Alone(), (6,), schedule, windows_of(m, window)) for schedule, m, window in CASES
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_order_gives_the_latents_and_gradients_of_one_process(results, stages):
    ranks = results(stages)
    for n, (schedule, trajectories, window) in enumerate(CASES):
        expected = reference(windows_of(trajectories, window))
        for begin in range(0, len(ranks) - stages + 1, stages):
            own = [ranks[begin + stage][n] for stage in range(stages)]
            final = own[-1]["final"]
            for m in range(trajectories):
                # The same operations on the same numbers.
                assert torch.equal(final[m], expected["final"][m])
                if schedule != "rollout":
                    _check_gradients(own, m, expected["grads"][m])


def _check_gradients(stages: list[dict], m: int, expected: dict[str, torch.Tensor]) -> None:
    found = {name: grad for stage in stages for name, grad in stage["grads"][m].items()}
    assert sorted(found) == sorted(expected)
    for name, gradient in expected.items():
        # Steps are summed in another order; in bfloat16 that is a rounding of each sum.
        tolerance = 1e-2 if gradient.dtype == torch.bfloat16 else 1e-12
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error <= tolerance, (name, m, error)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_do_what_the_order_says_and_keep_no_more_graphs(results, stages):
    ranks = results(stages)
    for n, (schedule, trajectories, window) in enumerate(CASES):
        planned = phases(schedule, stages, STEPS, windows_of(trajectories, window))
        for stage in range(stages):
            result = ranks[stage][n]
            assert result["done"] == [phase.programs[stage] for phase in planned]
            assert result["most_kept"] == max(most_kept(p.programs[stage]) for p in planned)


UNEVEN = StageTimes((1.0, 1.3, 0.8, 1.1), (2.1, 2.0, 2.4, 1.7), latency=0.05)
CLOCKED = [(s, m) for s in ("rollout", "replay", "retain", "reweight") for m in TRAJECTORIES]


def _run_with_a_clock() -> list[list[float]]:
    transport = _transport(4)
    return [
        run_clocked(transport, schedule, same_windows(m, range(TRAINED)), UNEVEN)
        for schedule, m in CLOCKED
    ]


def test_stages_on_a_virtual_clock_take_the_times_of_the_simulation(run_ranks):
    ranks = run_ranks(4, _run_with_a_clock)
    for n, (schedule, trajectories) in enumerate(CLOCKED):
        found = phases(schedule, 4, STEPS, same_windows(trajectories, range(TRAINED)))
        for i, phase in enumerate(found):
            # Nobody stamps the time that a fast stage waits for its message to be taken.
            roomy = simulate(phase, UNEVEN, capacity=1000)
            ends = [rank[n][i] for rank in ranks]
            assert ends == pytest.approx([own[-1].end for own in roomy.spans])
            assert max(ends) == pytest.approx(simulate(phase, UNEVEN).makespan)
