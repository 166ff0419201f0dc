# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Every schedule, and jagg on each, gives the reference gradients of three tiny problems."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_leangrpo.diffusion.sampler import Sampling
from megatron_leangrpo.diffusion.selection import FirstFraction
from megatron_leangrpo.diffusion.sigmas import SigmaSchedule
from megatron_leangrpo.grpo.advantages import compute_advantages
from megatron_leangrpo.grpo.gradient_buffers import GradientBuffers
from megatron_leangrpo.grpo.objective import Objective
from megatron_leangrpo.grpo.passes import WholeModel
from megatron_leangrpo.grpo.placement import Slot, Wave
from megatron_leangrpo.grpo.rollout import WaveRollout
from megatron_leangrpo.grpo.schedules import SCHEDULES
from megatron_leangrpo.grpo.schedules.jagg import consecutive_windows
from megatron_leangrpo.grpo.stats import UpdateStats
from tests.grpo.test_end_to_end_vectors import CONVENTIONS, PROBLEMS, LinearPolicy, close
from tests.vectors import kernel_of, tensor

PLAN = FirstFraction(5).plan(0, 0, 0, 0)


class FlatGradients:
    """A linear policy whose gradients collect in one flat buffer, as in megatron's wrapper."""

    def __init__(self, problem):
        self.policy = LinearPolicy(problem)
        sizes = [p.numel() for p in self.policy.parameters()]
        flat = torch.zeros(sum(sizes), dtype=torch.float64)
        places, end = {}, 0
        for parameter in self.policy.parameters():
            start, end = end, end + parameter.numel()
            parameter.main_grad = flat[start:end].view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self._collect)
            places[parameter] = (start, end)
        self.buffers = [SimpleNamespace(grad_data=flat, param_index_map=places)]
        self.expert_parallel_buffers = []

    @staticmethod
    def _collect(parameter):
        parameter.main_grad += parameter.grad
        parameter.grad = None


class Policy:
    """The problem's policy; the conditioning is the number of the sample."""

    def __init__(self, problem, linear):
        self.linear, self.prompts = linear, tensor(problem["c"])

    def __call__(self, x, timestep, sample):
        return x @ self.linear.W.T + timestep[:, None] * self.linear.b + self.prompts[[sample]]


def gradient(name, schedule_name, window_size):
    """Roll out one sample at a time and let the schedule do the rest."""
    problem, stats = PROBLEMS[name], UpdateStats()
    model = FlatGradients(problem)
    buffers = GradientBuffers(model)
    passes = WholeModel(Policy(problem, model.policy), None, buffers)
    schedule = SCHEDULES[schedule_name](passes, Objective(clip_range=1e-4), buffers)
    schedule.begin(1 / (6 * len(PLAN.trained)))
    groups, rewards = problem["group_ids"], tensor(problem["rewards"])
    advantages = compute_advantages(rewards, torch.tensor(groups), CONVENTIONS[name])
    sigmas, noise = tensor(problem["sigmas"]), tensor(problem["eps"])
    trajectories = []
    for sample in range(6):
        sampling = Sampling(
            tensor(problem["x_init"])[[sample]],
            SigmaSchedule(sigmas, sigmas[:-1]),
            *kernel_of(problem),
            [PLAN],
            lambda step, sample=sample: noise[step][[sample]],
        )
        wave = Wave(sample, 0, (Slot(groups[sample], sample, 0),))
        windows = consecutive_windows([PLAN], window_size)
        rollout = WaveRollout(sampling, wave, sample, windows)
        trajectories += passes.roll_out([rollout], schedule)
        schedule.wave_rewarded(trajectories[-1], rewards[None, [sample]])
    ready = [(t, advantages.select([sample])) for sample, t in enumerate(trajectories)]
    schedule.train(ready, stats)
    schedule.finish()
    return model.policy.W.main_grad, model.policy.b.main_grad


@pytest.mark.parametrize("window_size", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_schedule_gives_the_reference_gradient_also_in_windows_of_two(
    name, schedule, window_size
):
    W, b = gradient(name, schedule, window_size)
    close(W, PROBLEMS[name]["first_update"]["grad_W"])
    close(b, PROBLEMS[name]["first_update"]["grad_b"])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_jagg_gives_the_reference_approximation_and_is_exact_where_it_must_be(name, schedule):
    W, b = gradient(name, schedule, window_size=4)
    close(W, PROBLEMS[name]["jagg"]["grad_W"])
    # dv/db is affine in sigma whatever the latents.
    close(b, PROBLEMS[name]["first_update"]["grad_b"])
