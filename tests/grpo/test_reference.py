# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The reference model of the KL term: the weights of the start, on the device or in host memory."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from diffusers.hooks.group_offloading import ModuleGroup

from megatron_leangrpo import platform
from tests.grpo import tiny


@pytest.fixture
def experiments(tmp_path):
    """The same run with its reference on the device and offloaded."""
    prompts = tiny.write_prompts(tmp_path)
    kl = {"kl_beta": 0.5, "kl_form": "velocity_mse", "group_size": 2}
    yield [
        tiny.start(tiny.tiny_config(prompts, grpo={**kl, "reference_offload": offload}))
        for offload in (False, True)
    ]
    platform.destroy_distributed()


def test_an_offloaded_reference_gives_the_same_gradient(experiments):
    gradients = []
    for experiment in experiments:
        with torch.no_grad():
            for parameter in experiment.policy.model.parameters():
                parameter.mul_(1.1)
        gradients.append(tiny.first_gradient(experiment, "retain")[0])
    assert tiny.worst(*gradients)[0] == 0.0
    assert any(tensor.any() for tensor in gradients[0].values())


def offload_events(prompts: str, stages: int) -> list[tuple[str, list[str]]]:
    """What is fetched and let go of in an iteration on this stage: the types of modules."""
    events = []

    def note(kind: str, method):
        def noted(group):
            events.append((kind, [type(module).__name__ for module in group.modules]))
            return method(group)

        return noted

    kl = {"kl_beta": 0.5, "group_size": 2, "reference_offload": True}
    parallel = {"pipeline_model_parallel_size": stages}
    experiment = tiny.start(tiny.tiny_config(prompts, grpo=kl, parallel=parallel))
    with (
        mock.patch.object(ModuleGroup, "onload_", note("fetch", ModuleGroup.onload_)),
        mock.patch.object(ModuleGroup, "offload_", note("release", ModuleGroup.offload_)),
    ):
        tiny.first_gradient(experiment, "retain")
    return events


@pytest.mark.parametrize("stages", [1, 2])
def test_an_offloaded_reference_fetches_a_block_at_a_time_and_lets_it_go(
    run_ranks, tmp_path, stages
):
    blocks = ("DoubleStreamBlock", "SingleStreamBlock")
    ranks = run_ranks(stages, offload_events, tiny.write_prompts(tmp_path), stages)
    for stage, events in enumerate(ranks):
        for block in blocks if stages == 1 else blocks[stage : stage + 1]:
            of_block = [kind for kind, modules in events if modules == [block]]
            assert of_block[:4] == ["fetch", "release"] * 2
        # What is no block: embedders, or the projection to a velocity.
        around = [kind for kind, modules in events if not set(modules) & set(blocks)]
        assert around[:4] == ["fetch", "release"] * 2


def test_the_reference_does_not_follow_the_policy(experiments):
    reference = experiments[0].reference.model
    before = {
        name: value.clone() for name, value in reference.state_dict().items() if value is not None
    }
    with torch.no_grad():
        for parameter in experiments[0].policy.model.parameters():
            parameter.zero_()
    after = reference.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
