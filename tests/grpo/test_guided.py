# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Guidance by a negative prompt: one doubled forward or two, with and without its gradient.

That rollout and update agree under it is in test_schedules_agree.py and test_reweight.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.grpo.guided import GuidedPolicy
from megatron_leangrpo.grpo.policy import Policy
from tests.grpo import tiny

# The same sums in batches of another size.
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=["flux", "wan"])
def guided(request, tmp_path_factory) -> Iterator[tuple[GuidedPolicy, tuple]]:
    """A guided policy and inputs of two samples."""
    prompts = tiny.write_prompts(tmp_path_factory.mktemp("prompts"))
    sections = tiny.merged(
        tiny.WAN if request.param == "wan" else {},
        {"sampling": {"cfg_scale": 3.0, "negative_prompt": "nothing"}},
    )
    experiment = tiny.start(tiny.tiny_config(prompts, **sections))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *experiment.settings.latent_shape, generator=generator)
    yield experiment.policy, (x, torch.full((2,), 0.7), experiment.encode(["one", "two"]))
    platform.destroy_distributed()


def _with(policy: GuidedPolicy, **changes) -> GuidedPolicy:
    return GuidedPolicy(policy, dataclasses.replace(policy.guidance, **changes))


def _gradients(policy: Policy, velocity: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a linear functional of the velocity."""
    weights = torch.linspace(-1, 1, velocity.numel()).view_as(velocity)
    named = dict(policy.model.named_parameters())
    # Megatron's wrapper would collect what `backward` gives.
    found = torch.autograd.grad((velocity * weights).sum(), list(named.values()))
    return dict(zip(named, found))


@pytest.mark.parametrize("forwards", ["joint", "separate"])
def test_the_velocity_leads_from_the_negative_prompt_to_the_other(guided, forwards):
    policy, (x, timestep, conditioning) = guided
    plain = Policy(policy.model, policy.grid, policy.dtype)
    conditional = plain(x, timestep, conditioning)
    negative = plain(x, timestep, policy.guidance.negative.select([0, 0]))
    assert tiny.relative_l2(conditional, negative) > 1e-3
    expected = negative + 3 * (conditional - negative)
    found = _with(policy, forwards=forwards)(x, timestep, conditioning)
    assert tiny.relative_l2(found.detach(), expected.detach()) < TOLERANCE
    error, name = tiny.worst(_gradients(policy, found), _gradients(policy, expected))
    assert error < TOLERANCE, name


@pytest.mark.parametrize("forwards", ["joint", "separate"])
def test_detached_the_negative_prompt_has_no_part_in_the_gradient(guided, forwards):
    policy, inputs = guided
    plain = Policy(policy.model, policy.grid, policy.dtype)
    found = _with(policy, forwards=forwards, detach=True)(*inputs)
    error, name = tiny.worst(_gradients(policy, found), _gradients(policy, 3 * plain(*inputs)))
    assert error < TOLERANCE, name


def test_each_expert_has_its_scale_and_scale_one_is_a_single_forward(guided):
    policy, (x, _, conditioning) = guided
    batches = []
    handle = policy.model.register_forward_pre_hook(
        lambda _, inputs: batches.append(len(inputs[0]))
    )
    two = _with(policy, boundary=0.7, low_noise_scale=1.0)
    high, low = (two(x, torch.full((2,), t), conditioning) for t in (0.7, 0.69))
    handle.remove()
    assert batches == [4, 2]
    plain = Policy(policy.model, policy.grid, policy.dtype)
    assert torch.equal(low, plain(x, torch.full((2,), 0.69), conditioning))
    assert torch.equal(high, policy(x, torch.full((2,), 0.7), conditioning))
