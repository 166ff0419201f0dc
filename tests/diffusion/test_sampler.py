# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The sampling steps: what the policy sees, and what comes out."""

import itertools

import pytest
import torch

from megatron_leangrpo.diffusion.kernels import log_prob, step_coefficients
from megatron_leangrpo.diffusion.sampler import CHECKED, Sampling
from megatron_leangrpo.diffusion.selection import DETERMINISTIC, StepPlan
from megatron_leangrpo.diffusion.sigmas import build_sigma_schedule
from tests.sampling import rollout

SCHEDULE = build_sigma_schedule("static_shift", 4, shift=3.0)
ALL = StepPlan((0, 1, 2, 3), (0, 1, 2))


def recorded(policy, x, kernel, level, plans, noise, kept=range(4)):
    """Sample step by step: the sampling, and (step, velocity, x, x_next, log_prob) of each."""
    sampling, steps = Sampling(x, SCHEDULE, kernel, level, plans, noise), []
    while not sampling.is_done:
        step, x = sampling.step, sampling.x
        with torch.set_grad_enabled(step in kept):
            velocity = policy(x, sampling.timestep)
        drawn = sampling.advance(velocity)
        steps.append((step, velocity, x, drawn.x_next, drawn.log_prob))
    return sampling, steps


class Policy(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4, dtype=dtype)
        self.timesteps = []

    def forward(self, x, timestep):
        self.timesteps.append(timestep)
        scaled = x * timestep.view(-1, *[1] * (x.dim() - 1))
        return self.linear(scaled.to(self.linear.weight.dtype))


def noise_like(shape, dtype=torch.float32):
    def noise(step):
        rng = torch.Generator().manual_seed(step)
        return torch.randn(shape, generator=rng, dtype=dtype)

    return noise


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(2, 6, 4), (2, 3, 2, 5, 4)])
def test_ode_sampling_integrates_a_constant_velocity_exactly(shape):
    x = torch.randn(shape, dtype=torch.float64)
    velocity = torch.randn(shape, dtype=torch.float64)

    def no_noise(step):
        raise AssertionError("an ODE draws no noise")

    plans = [DETERMINISTIC] * 2
    final = rollout(lambda x, t: velocity, x, SCHEDULE, "flow_sde", 0.7, plans, no_noise)
    torch.testing.assert_close(final, x - velocity, rtol=0, atol=1e-14)


def test_only_velocities_carry_graphs():
    x = torch.randn(2, 6, 4, requires_grad=True)
    noise = noise_like(x.shape)
    sampling, steps = recorded(Policy(), x, "flow_sde", 0.7, [ALL] * 2, noise, kept=(1, 2))
    assert [step for step, *_ in steps] == [0, 1, 2, 3]
    assert [velocity.requires_grad for _, velocity, *_ in steps] == [False, True, True, False]
    for _, _, x_in, x_next, value in steps:
        assert not (x_in.requires_grad or x_next.requires_grad or value.requires_grad)
    assert not sampling.result.requires_grad
    for before, after in itertools.pairwise(steps):
        assert after[2] is before[3]


def test_a_rollout_records_nothing():
    policy, seen = Policy(), []

    def watched(x, timestep):
        seen.append(torch.is_grad_enabled())
        return policy(x, timestep)

    x = torch.randn(1, 6, 4)
    rollout(watched, x, SCHEDULE, "ode", None, [DETERMINISTIC], noise_like(x.shape))
    assert seen == [False] * 4


def test_policy_gets_the_schedule_timesteps_in_the_latents_type():
    policy = Policy()
    schedule = build_sigma_schedule("static_shift", 4, shift=3.0, truncate_timesteps=True)
    x = torch.randn(3, 6, 4)
    rollout(policy, x, schedule, "dance_sde", 0.3, [ALL] * 3, noise_like(x.shape))
    for step, timestep in enumerate(policy.timesteps):
        assert timestep.dtype == torch.float32
        assert torch.equal(timestep, schedule.timesteps[step].float().expand(3))


@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde", "cps"])
def test_predicted_x0_ignores_the_noise_of_the_last_step(kernel):
    policy, x = Policy(), torch.randn(2, 6, 4)

    def run(last, output):
        def noise(step):
            return noise_like(x.shape)(step + (last if step == 3 else 0))

        return rollout(policy, x, SCHEDULE, kernel, 0.3, [ALL] * 2, noise, output=output)

    assert torch.equal(run(0, "predicted_x0"), run(1, "predicted_x0"))
    if kernel == "cps":  # its last step is deterministic anyway
        torch.testing.assert_close(run(0, "predicted_x0"), run(0, "final"))
    else:
        assert not torch.equal(run(0, "final"), run(1, "final"))


def test_samples_with_different_windows_do_not_disturb_each_other():
    policy = Policy(torch.float64)
    plans = [StepPlan((0, 1), (0, 1)), StepPlan((2,), (2,)), DETERMINISTIC, ALL]
    x = torch.randn(4, 6, 4, dtype=torch.float64)
    noise = noise_like(x.shape, torch.float64)
    sampling, steps = recorded(policy, x, "flow_sde", 0.7, plans, noise)
    together = sampling.result.detach()
    for i, plan in enumerate(plans):

        def own_noise(step, i=i):
            return noise(step)[i : i + 1]

        alone = rollout(policy, x[i : i + 1], SCHEDULE, "flow_sde", 0.7, [plan], own_noise)
        # matrix products of other batch sizes may round differently
        torch.testing.assert_close(together[i : i + 1], alone, rtol=0, atol=1e-14)
        for step, *_, value in steps:
            assert (value[i] != 0) == (step in plan.stochastic)


def test_noise_is_drawn_only_where_some_sample_is_stochastic():
    drawn, x = [], torch.randn(2, 6, 4)

    def noise(step):
        drawn.append(step)
        return noise_like(x.shape)(step)

    plans = [StepPlan((1,), (1,)), StepPlan((2,), (2,))]
    rollout(Policy(), x, SCHEDULE, "flow_sde", 0.7, plans, noise)
    assert drawn == [1, 2]


@pytest.mark.parametrize("model_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["flow_sde", "dance_sde", "cps"])
def test_replaying_a_recorded_step_gives_ratio_one_bit_for_bit(kernel, model_dtype):
    policy = Policy(model_dtype)
    latent_dtype = torch.promote_types(model_dtype, torch.float32)
    x = torch.randn(3, 6, 4, dtype=latent_dtype)
    plans = [ALL, StepPlan((1,), (1,)), DETERMINISTIC]
    _, steps = recorded(policy, x, kernel, 0.3, plans, noise_like(x.shape))
    for step, _, x_in, x_next, old in steps:
        assert x_next.dtype == old.dtype == latent_dtype
        stochastic = [step in plan.stochastic for plan in plans]
        c = step_coefficients(kernel, 0.3, SCHEDULE.sigmas, step, stochastic)
        timestep = SCHEDULE.timesteps[step].to(x_in).expand(3)
        new = log_prob(x_in, policy(x_in, timestep), x_next, c)
        assert new.requires_grad
        assert torch.equal((new - old).exp(), torch.ones_like(new))


def test_what_is_not_finite_is_known_by_step_tensor_and_sample():
    def policy(x, timestep):
        velocity = x.clone()
        if timestep[0] == SCHEDULE.timesteps[2].float():
            velocity[1] = torch.nan
        return velocity

    x = torch.randn(2, 6, 4)
    sampling, _ = recorded(policy, x, "flow_sde", 0.7, [ALL] * 2, noise_like(x.shape))
    assert sampling.finite.shape == (4, len(CHECKED), 2)
    assert sampling.finite[:2].all() and sampling.finite[:, :, 0].all()
    assert not sampling.finite[2:, :, 1].any()
