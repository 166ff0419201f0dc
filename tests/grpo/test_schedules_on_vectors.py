# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Every schedule, and jagg on each, gives the reference gradients of three tiny problems."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_leangrpo.diffusion.kernels import step_coefficients
from megatron_leangrpo.diffusion.sampler import rollout
from megatron_leangrpo.diffusion.selection import FirstFraction
from megatron_leangrpo.diffusion.sigmas import SigmaSchedule
from megatron_leangrpo.grpo.advantages import compute_advantages
from megatron_leangrpo.grpo.gradient_buffers import GradientBuffers
from megatron_leangrpo.grpo.objective import Objective
from megatron_leangrpo.grpo.placement import Slot, Wave
from megatron_leangrpo.grpo.schedules import SCHEDULES
from megatron_leangrpo.grpo.schedules.jagg import consecutive_windows
from megatron_leangrpo.grpo.stats import UpdateStats
from megatron_leangrpo.grpo.trajectory import TrainedStep, WaveTrajectory, Window
from tests.grpo.test_end_to_end_vectors import CONVENTIONS, PROBLEMS, LinearPolicy, close
from tests.vectors import kernel_of, tensor

PLAN = FirstFraction(5).plan(0, 0, 0, 0)


class FlatGradients:
    """A linear policy whose gradients are views into one flat buffer, as megatron's are."""

    def __init__(self, problem):
        self.policy = LinearPolicy(problem)
        sizes = [p.numel() for p in self.policy.parameters()]
        flat = torch.zeros(sum(sizes), dtype=torch.float64)
        for parameter, view in zip(self.policy.parameters(), flat.split(sizes)):
            parameter.grad = view.view_as(parameter)
        self.buffers = [SimpleNamespace(grad_data=flat)]
        self.expert_parallel_buffers = []


class Recorder:
    """Hands windows of one sample's trajectory to a schedule, as the package's rollout does."""

    def __init__(self, problem, schedule, trajectory, window_size, stats):
        self.problem, self.schedule, self.trajectory = problem, schedule, trajectory
        self.windows, self.stats = consecutive_windows([PLAN], window_size), stats
        self.open = []

    def keeps_graph(self, step):
        ends = {end for window in self.windows for end in (window[0], window[-1])}
        return self.schedule.keeps_graph and step in ends

    def record(self, step, velocity, x, x_next, log_prob):
        window = next((window for window in self.windows if step in window), None)
        if window is None:
            return
        sigmas = tensor(self.problem["sigmas"])
        c = step_coefficients(*kernel_of(self.problem), sigmas, step)
        everyone = torch.ones(len(x), dtype=torch.bool)
        timestep = sigmas[step].expand(len(x))
        self.open.append(TrainedStep(step, timestep, c, x, x_next, log_prob, everyone, velocity))
        if step == window[-1]:
            closed, self.open = Window(self.open), []
            self.trajectory.windows.append(closed)
            if self.schedule.keeps_graph:
                self.schedule.window_drawn(self.trajectory, closed, self.stats)


def gradient(name, schedule_name, window_size):
    """Roll out one sample at a time and let the schedule do the rest."""
    problem, stats = PROBLEMS[name], UpdateStats()
    model = FlatGradients(problem)
    prompts = tensor(problem["c"])

    def policy(x, timestep, sample):
        return x @ model.policy.W.T + timestep[:, None] * model.policy.b + prompts[[sample]]

    schedule = SCHEDULES[schedule_name](
        policy, Objective(clip_range=1e-4), None, GradientBuffers(model)
    )
    schedule.begin(1 / (6 * len(PLAN.trained)))
    groups, rewards = problem["group_ids"], tensor(problem["rewards"])
    advantages = compute_advantages(rewards, torch.tensor(groups), CONVENTIONS[name])
    sigmas, noise = tensor(problem["sigmas"]), tensor(problem["eps"])
    trajectories = []
    for sample in range(6):
        wave = Wave(sample, 0, (Slot(groups[sample], sample, 0),))
        trajectory = WaveTrajectory(wave, sample)
        trajectory.latents = rollout(
            lambda x, t, sample=sample: policy(x, t, sample),
            tensor(problem["x_init"])[[sample]],
            SigmaSchedule(sigmas, sigmas[:-1]),
            *kernel_of(problem),
            [PLAN],
            lambda step, sample=sample: noise[step][[sample]],
            hook=Recorder(problem, schedule, trajectory, window_size, stats),
        )
        schedule.wave_rewarded(trajectory, rewards[None, [sample]])
        trajectories.append(trajectory)
    for sample, trajectory in enumerate(trajectories):
        schedule.backward(trajectory, advantages.select([sample]), stats)
    schedule.finish()
    return model.policy.W.grad, model.policy.b.grad


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
