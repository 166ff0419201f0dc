# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Layouts with pipeline stages: what a stage holds, how long it computes, how long it waits."""

import dataclasses

import pytest

from megatron_leangrpo.config import GrpoConfig
from megatron_leangrpo.grpo.in_flight import batch_of
from megatron_leangrpo.planner.memory import rank_memory
from megatron_leangrpo.planner.pipelining import (
    pipeline_memory,
    pipeline_seconds,
    stage_works,
)
from megatron_leangrpo.planner.seconds import iteration_seconds, pass_seconds
from megatron_leangrpo.planner.workload import Ranks
from tests.planner.test_selector import H100, flux, found, wan

BATCH = batch_of(GrpoConfig(prompts_per_iteration=48, group_size=24, micro_batch_size=1), 8)


@pytest.mark.parametrize("work", [flux(), wan()], ids=["flux", "wan"])
def test_stages_together_are_the_whole_transformer(work):
    for stages in (1, 2, 4, 8):
        works = stage_works(work, BATCH, "none", Ranks(4, data=8, pipeline=stages), H100)
        shapes = [own.shape for own in works]
        kinds = [kind for shape in shapes for kind, n in shape.blocks for _ in range(n)]
        assert kinds == [kind for kind, n in work.shape.blocks for _ in range(n)]
        total = sum(shape.parameters for shape in shapes)
        assert total == pytest.approx(work.shape.parameters, rel=1e-6)
        seconds = [sum(pass_seconds(own, BATCH, "none", Ranks(4), H100)) for own in works]
        # To half a block or so, and the output that every stage is charged with.
        blocks = len(kinds) / stages
        assert max(seconds) <= sum(seconds) / stages * (1 + 0.8 / blocks)


@pytest.mark.parametrize("schedule", ["replay", "retain", "reweight"])
def test_one_stage_is_no_pipeline(schedule):
    alone = Ranks(4, data=8)
    memory = pipeline_memory(flux(), BATCH, schedule, "none", alone, H100)
    expected = rank_memory(flux(), BATCH, schedule, "none", alone)
    # Graphs and trajectories in flight are those of one wave at a time, or all of retain's.
    assert memory.weights == expected.weights and memory.moments == expected.moments
    assert memory.activations == pytest.approx(expected.activations, rel=0.05)
    seconds = pipeline_seconds(flux(), BATCH, schedule, "none", alone, H100)
    expected_seconds = iteration_seconds(flux(), BATCH, schedule, "none", alone, H100)
    assert seconds.idle == pytest.approx(0, abs=1e-3)
    assert seconds.total == pytest.approx(expected_seconds.total, rel=1e-3)


def test_stages_share_weights_and_hold_a_graph_for_each_stage_behind_them():
    def activations(pipeline: int, schedule: str) -> int:
        ranks = Ranks(4, data=8, pipeline=pipeline)
        return pipeline_memory(flux(), BATCH, schedule, "none", ranks, H100).activations

    memory = [
        pipeline_memory(flux(), BATCH, "reweight", "none", Ranks(4, data=8, pipeline=p), H100)
        for p in (1, 2, 4)
    ]
    # Double blocks, of the first stages, have most of the weights.
    assert 0.5 * memory[0].weights < memory[1].weights < 0.7 * memory[0].weights
    # A gradient buffer for each trajectory in flight is of a stage's weights only.
    assert memory[2].moments < 2 * memory[0].moments
    # P graphs of a P-th of the blocks.
    assert activations(4, "reweight") == pytest.approx(activations(1, "reweight"), rel=0.25)
    assert activations(4, "retain") < 0.5 * activations(1, "retain")


def test_pipelines_wait_and_few_trajectories_make_them_wait_longer():
    ranks = Ranks(4, data=8, pipeline=4)
    seconds = pipeline_seconds(flux(), BATCH, "reweight", "none", ranks, H100)
    alone = iteration_seconds(flux(), BATCH, "reweight", "none", Ranks(4, data=8), H100)
    assert 0.05 < seconds.idle < 0.2
    # Four times the devices.
    assert alone.total / 4 < seconds.total < alone.total / 2
    few = dataclasses.replace(BATCH, waves=2, trained_waves=2)
    assert pipeline_seconds(flux(), few, "replay", "none", ranks, H100).idle > 0.25


def test_layouts_with_stages_are_told_apart():
    layouts = [Ranks(4, data=4, pipeline=2)]
    rows = found(flux(), layouts)
    assert {row.schedule for row in rows} == {"replay", "retain", "reweight"}
    assert {str(row.ranks) for row in rows} == {"TP 4 x PP 2 x DP 4"}
