# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Layouts with pipeline stages: what a stage holds, how long it computes, how long it waits."""

import dataclasses

import pytest

from megatron_leangrpo.config import GrpoConfig
from megatron_leangrpo.grpo.in_flight import batch_of
from megatron_leangrpo.models.flux.config import flux_dev
from megatron_leangrpo.models.wan.config import WanConfig
from megatron_leangrpo.planner.memory import rank_memory
from megatron_leangrpo.planner.pipelining import (
    pipeline_seconds,
    stage_memories,
    stage_times,
    trained_windows,
)
from megatron_leangrpo.planner.seconds import iteration_seconds
from megatron_leangrpo.planner.splitting import split_of, stage_works
from megatron_leangrpo.planner.workload import Batch, Jagg, Ranks
from tests.planner.test_selector import H100, flux, found, wan

GRPO = GrpoConfig(prompts_per_iteration=48, group_size=24, micro_batch_size=1)


def batch_on(ranks: Ranks, waves_in_flight: int | None = None) -> Batch:
    flight = ranks.pipeline if waves_in_flight is None else waves_in_flight
    return batch_of(GRPO, ranks.data, waves_in_flight=flight)


@pytest.mark.parametrize("work", [flux(), wan()], ids=["flux", "wan"])
def test_stages_together_are_the_whole_transformer(work):
    for stages in (1, 2, 4, 8):
        shapes = [own.shape for own in stage_works(work, Ranks(pipeline=stages))]
        assert sum((shape.kinds for shape in shapes), ()) == work.shape.kinds
        assert sum(shape.parameters for shape in shapes) == work.shape.parameters
        assert [shape.is_first for shape in shapes] == [True] + [False] * (stages - 1)
        assert [shape.is_last for shape in shapes] == [False] * (stages - 1) + [True]


@pytest.mark.parametrize("split", ["memory", (30, 5, 5, 17)])
def test_a_run_is_split_as_it_is_planned(split):
    for work, settings in ((flux(), flux_dev()), (wan(), WanConfig())):
        own = split
        if isinstance(split, tuple):
            own = (*split[:3], len(work.shape.kinds) - sum(split[:3]))
            if own[-1] < 1:
                own = (10, 5, 5, len(work.shape.kinds) - 20)
        work = dataclasses.replace(work, pipeline_split=own)
        run = dataclasses.replace(settings, pipeline_model_parallel_size=4, pipeline_split=own)
        assert split_of(work, Ranks(pipeline=4)) == tuple(
            len(run.stage(n).blocks) for n in range(4)
        )
        # A list of four numbers says nothing of two stages.
        assert sum(split_of(work, Ranks(pipeline=2))) == len(work.shape.kinds)


@pytest.mark.parametrize("tensor", [1, 4, 8])
def test_stages_take_as_long_as_one_another(tensor):
    # A double block of FLUX has ten collectives, a single one three, and twice the weights.
    ranks = Ranks(tensor, data=2, pipeline=4)
    work, batch = flux(), batch_on(ranks)
    times = stage_times(work, batch, "none", ranks, H100)
    assert max(times.both) < 1.05 * sum(times.both) / 4
    even = dataclasses.replace(work, pipeline_split=(14, 14, 14, 15))
    slower = stage_times(even, batch, "none", ranks, H100)
    assert max(slower.both) > 1.1 * max(times.both)
    # Wan's are alike, and its text's embedders and output next to nothing beside them.
    assert split_of(wan(), ranks) == (10, 10, 10, 10)


def test_embedders_take_blocks_from_the_first_stage():
    # Every tensor-parallel rank embeds a long text whole.
    shape = dataclasses.replace(
        flux().shape,
        blocks=(("single", 16),),
        block_parameters=flux().shape.block_parameters[1:],
        text_tokens=4096,
        text_width=16384,
    )
    first, second = split_of(dataclasses.replace(flux(), shape=shape), Ranks(8, pipeline=2))
    assert first < second - 1


@pytest.mark.parametrize("schedule", ["replay", "retain", "reweight"])
def test_one_stage_is_no_pipeline(schedule):
    alone = Ranks(4, data=8)
    batch = batch_on(alone)
    (memory,) = stage_memories(flux(), batch, schedule, "none", alone)
    assert memory == rank_memory(flux(), batch, schedule, "none", alone)
    seconds = pipeline_seconds(flux(), batch, schedule, "none", alone, H100)
    expected_seconds = iteration_seconds(flux(), batch, schedule, "none", alone, H100)
    assert seconds.idle == pytest.approx(0, abs=1e-3)
    assert seconds.total == pytest.approx(expected_seconds.total, rel=1e-3)


def test_stages_share_weights_and_hold_a_graph_for_each_stage_behind_them():
    def memories(pipeline: int, schedule: str):
        ranks = Ranks(4, data=8, pipeline=pipeline)
        return stage_memories(flux(), batch_on(ranks), schedule, "none", ranks)

    whole, halves, quarters = (memories(pipeline, "reweight") for pipeline in (1, 2, 4))
    # Double blocks, of the first stages, have most of the weights and take the longest.
    assert 0.4 * whole[0].weights < halves[0].weights < 0.7 * whole[0].weights
    assert sum(stage.weights for stage in quarters) == pytest.approx(whole[0].weights, rel=1e-6)
    # A gradient buffer for each trajectory in flight is of a stage's weights only.
    assert quarters[0].moments < 3 * whole[0].moments
    # P graphs of a P-th of the blocks on the first stage, one on the last.
    assert quarters[0].activations == pytest.approx(whole[0].activations, rel=0.3)
    assert quarters[3].activations < 0.4 * quarters[0].activations
    # Rounds of four waves, of which three make a group, keep more waiting than single waves do.
    assert memories(4, "retain")[0].activations < 0.6 * memories(1, "retain")[0].activations
    # Messages: none below the first stage and above the last.
    ends, between = [quarters[n].messages for n in (0, 3)], quarters[1].messages
    assert ends[0] == ends[1] == between / 2 > 0


def test_pipelines_wait_and_few_trajectories_make_them_wait_longer():
    ranks = Ranks(4, data=8, pipeline=4)

    def seconds_with(waves_in_flight: int, schedule: str = "reweight"):
        batch = batch_on(ranks, waves_in_flight)
        return pipeline_seconds(flux(), batch, schedule, "none", ranks, H100)

    alone = Ranks(4, data=8)
    whole = iteration_seconds(flux(), batch_on(alone), "reweight", "none", alone, H100)
    # 12.3 % if the stages could be equal.
    assert 0.1 < seconds_with(4).idle < 0.15
    # Four times the devices.
    assert whole.total / 4 < seconds_with(4).total < whole.total / 2
    assert seconds_with(2, "replay").idle > 0.25
    assert seconds_with(16).idle < seconds_with(8).idle < seconds_with(4).idle
    # 144 waves in rounds of 5 leave 4 for the last one.
    assert seconds_with(4).idle == pytest.approx(seconds_with(5).idle, abs=0.05)


def test_windows_that_are_approximated_stand_among_the_others():
    work = flux(trained_steps=9, sampled_steps=10, jagg=Jagg("reweight", 3, 0.5))
    windows = trained_windows(work, "jagg", 1)
    assert [step for window in windows for step in window] == list(range(9))
    assert sorted(len(window) for window in windows) == [1, 1, 1, 3, 3]
    assert trained_windows(work, "reweight", 1) == tuple((step,) for step in range(9))
    ranks = Ranks(4, data=8, pipeline=4)
    on_reweight, exact = (
        pipeline_seconds(work, batch_on(ranks), name, "none", ranks, H100)
        for name in ("jagg", "reweight")
    )
    # Windows end in bursts, for which stages wait.
    assert on_reweight.idle > exact.idle


def test_layouts_with_stages_are_told_apart():
    layouts = [Ranks(4, data=4, pipeline=2)]
    rows = found(flux(), layouts)
    assert {row.schedule for row in rows} == {"replay", "retain", "reweight", "jagg"}
    assert {str(row.ranks) for row in rows} == {"TP 4 x PP 2 x DP 4"}
    for row in rows:
        assert row.memory.total == max(stage.memory.total for stage in row.stages)
        assert sum(stage.blocks for stage in row.stages) == 57
