# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Gradients summed beside the last backward: in one order on all ranks, and the same sums."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.grpo.optimization import build_optimization
from tests.grpo import tiny

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "replay, two updates": {"grpo": {"schedule": "replay", "updates_per_rollout": 2}},
    "retain": {"grpo": {"schedule": "retain"}},
    # Ranks end with different steps.
    "replay, a random fraction for each sample": {
        "grpo": {"schedule": "replay"},
        "sampling": {"step_selection": "random_fraction", "num_steps": 4, "timestep_fraction": 0.7},
    },
    "jagg, whose backwards get fewer": {
        "grpo": {"schedule": "jagg", "jagg_on": "retain", "jagg_frac": 1.0},
        "sampling": {"num_steps": 5},
    },
    "reweight, which has no last backward": {
        "grpo": {"schedule": "reweight", "micro_batch_size": 1}
    },
    "whole gradients on every rank": {
        "grpo": {"schedule": "retain"},
        "optimizer": {"use_distributed_optimizer": False},
    },
}
ITERATIONS = 2


def _train(
    prompts: str, case: dict[str, dict[str, Any]], overlap: bool
) -> tuple[tiny.Tensors, list[list[str]]]:
    """The weights after some iterations, and the events of each update.

    Events are the start of a bucket by its number, and "end" where the update's backwards are over.
    """
    optimizer = {"overlap_grad_reduce": overlap, "lr": 1e-3, **case.get("optimizer", {})}
    config = tiny.tiny_config(prompts, **{**case, "optimizer": optimizer})
    with tiny.buckets_of(3000):
        experiment = tiny.start(config)
    optimization = build_optimization(experiment.model, config.optimizer, ITERATIONS * 2)
    runner, events = experiment.runner(config.grpo.schedule), [[]]

    def apply_update() -> dict[str, float]:
        events.append([])
        return optimization.step()

    with _recorded_starts(experiment.model, events):
        for iteration in range(ITERATIONS):
            runner.run(iteration, experiment.sampler.batch(iteration), apply_update)
    return tiny.weights(experiment), events[:-1]


def _recorded_starts(model: torch.nn.Module, events: list[list[str]]):
    group_class = type(model.bucket_groups[0])
    start, finish = group_class.start_grad_sync, group_class.finish_grad_sync

    def recorded_start(group, *arguments, **options):
        if group.grad_reduce_handle is None:
            events[-1].append(str(model.bucket_groups.index(group)))
        return start(group, *arguments, **options)

    def recorded_finish(group, *arguments, **options):
        if group is model.bucket_groups[0]:
            events[-1].append("end")
        return finish(group, *arguments, **options)

    return mock.patch.multiple(
        group_class, start_grad_sync=recorded_start, finish_grad_sync=recorded_finish
    )


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    return tiny.write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_one_reduction_bit_for_bit(run_ranks, prompts, name):
    case = CASES[name]
    early = run_ranks(2, _train, prompts, case, True)
    late = run_ranks(2, _train, prompts, case, False)
    for (weights, events), (expected, _) in zip(early, late):
        # Two numbers have one sum, in whatever bucket.
        assert all(torch.equal(weights[key], expected[key]) for key in expected)
        for update in events:
            buckets = [event for event in update if event != "end"]
            assert len(buckets) > 5 and buckets == sorted(buckets, key=int)
            started = update.index("end")
            if "reweight" in name:
                assert started == 0
            else:
                # Of the last bucket the backward may leave nothing to hide behind.
                assert started >= len(buckets) - 1


def _one_without_signal(prompts: str) -> tuple[tiny.Tensors, list[list[str]]]:
    """Rank 1 has no advantages and so no last backward."""
    from megatron_leangrpo.grpo.iteration import IterationRunner

    select = IterationRunner._advantages

    def silenced(runner, table):
        advantages = select(runner, table)
        if platform.dp_rank() == 1:
            advantages.values.zero_()
        return advantages

    with mock.patch.object(IterationRunner, "_advantages", silenced):
        return _train(prompts, {"grpo": {"schedule": "replay"}}, True)


def test_a_rank_without_a_backward_takes_part_in_the_same_order(run_ranks, prompts):
    (weights, _), (others, events) = run_ranks(2, _one_without_signal, prompts)
    assert all(update[0] == "end" for update in events)
    assert all(torch.equal(weights[key], others[key]) for key in weights)
