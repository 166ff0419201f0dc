# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Three tiny problems from noise to gradient: rollout, advantages, two updates, linear model."""

from dataclasses import dataclass

import pytest
import torch

from megatron_leangrpo.diffusion.kernels import (
    StepCoefficients,
    on_policy_velocity_gradient,
    step_coefficients,
)
from megatron_leangrpo.diffusion.sampler import Sampling
from megatron_leangrpo.diffusion.selection import FirstFraction
from megatron_leangrpo.diffusion.sigmas import SigmaSchedule, build_sigma_schedule
from megatron_leangrpo.grpo.advantages import compute_advantages
from megatron_leangrpo.grpo.objective import Objective, step_loss
from tests.vectors import VECTORS, kernel_of, tensor

PROBLEMS = {problem["id"]: problem for problem in VECTORS["end_to_end"]}
CONVENTIONS = {
    "flow_sde": "flow_grpo_group_std",
    "dance_sde": "dance_group",
    "cps": "flow_grpo_group_std",
}
ON_POLICY = Objective(clip_range=1e-4)


@dataclass(frozen=True)
class Step:
    x: torch.Tensor
    x_next: torch.Tensor
    old_log_prob: torch.Tensor
    coefficients: StepCoefficients
    velocity: torch.Tensor
    trained: torch.Tensor
    timestep: torch.Tensor


class LinearPolicy(torch.nn.Module):
    """v = W x + sigma * b + c, with the prompt in c."""

    def __init__(self, problem):
        super().__init__()
        self.W = torch.nn.Parameter(tensor(problem["W"]))
        self.b = torch.nn.Parameter(tensor(problem["b"]))
        self.c = tensor(problem["c"])

    def forward(self, x, timestep):
        return x @ self.W.T + timestep[:, None] * self.b + self.c


class Run:
    """One rollout of a problem by the package's own sampler."""

    def __init__(self, name, keep_graphs=False):
        self.problem = problem = PROBLEMS[name]
        sigmas = tensor(problem["sigmas"])
        schedule = SigmaSchedule(sigmas, sigmas[:-1])
        self.policy = LinearPolicy(problem)
        self.trained, self.latents, self.log_probs = [], [], []
        plan = FirstFraction(5).plan(0, 0, 0, 0)
        assert list(plan.trained) == problem["trained_steps"]
        self.noise = tensor(problem["eps"])
        output = "predicted_x0" if problem["reward_on"].startswith("x0_pred") else "final"
        sampling = Sampling(
            tensor(problem["x_init"]),
            schedule,
            *kernel_of(problem),
            [plan] * 6,
            lambda step: self.noise[step],
            output,
        )
        while not sampling.is_done:
            self.draw(sampling, keep_graphs)
        self.final = sampling.result
        self.rewards = -((self.final - tensor(problem["target"])) ** 2).mean(1)
        ids = torch.tensor(problem["group_ids"])
        self.advantages = compute_advantages(self.rewards, ids, CONVENTIONS[name]).values

    def draw(self, sampling, keep_graphs):
        """Draw a step and store it, if it is trained, with or without its graph."""
        step, x, timestep = sampling.step, sampling.x, sampling.timestep
        trained = step in self.problem["trained_steps"]
        with torch.set_grad_enabled(keep_graphs and trained):
            velocity = self.policy(x, timestep)
        drawn = sampling.advance(velocity)
        self.latents.append(drawn.x_next)
        self.log_probs.append(drawn.log_prob)
        if trained:
            c = step_coefficients(*kernel_of(self.problem), sampling.schedule.sigmas, step)
            everyone = torch.ones(len(x), dtype=torch.bool)
            old = drawn.x_next, drawn.log_prob
            self.trained.append(Step(x, *old, c, velocity, everyone, timestep))

    def update(self, objective, replay):
        """Accumulate the gradient over samples and trained steps; returns loss and ratios."""
        total, ratios = 0.0, []
        for step in self.trained:
            velocity = self.policy(step.x, step.timestep) if replay else step.velocity
            loss, stats = step_loss(velocity, step, self.advantages, objective)
            scaled = loss.sum() / (len(loss) * len(self.trained))
            scaled.backward()
            total += scaled.item()
            ratios.append(stats["ratio"])
        return total, torch.stack(ratios)


def close(actual, expected):
    torch.testing.assert_close(actual, tensor(expected), rtol=1e-10, atol=1e-13)


def test_every_reference_problem_is_covered():
    assert set(PROBLEMS) == {"flow_sde", "dance_sde", "cps"}


@pytest.mark.parametrize("name", PROBLEMS)
def test_schedule_is_a_static_shift(name):
    problem = PROBLEMS[name]
    sigmas = build_sigma_schedule("static_shift", 5, shift=3.0).sigmas
    torch.testing.assert_close(sigmas, tensor(problem["sigmas"]), rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", PROBLEMS)
def test_rollout_rewards_and_advantages_equal_the_reference(name):
    run, problem = Run(name), PROBLEMS[name]
    close(torch.stack(run.latents), problem["trajectory"][1:])
    close(torch.stack(run.log_probs), problem["old_logp"])
    close(run.final, problem["final"])
    close(run.rewards, problem["rewards"])
    close(run.advantages, problem["advantages"])


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "retain"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_first_update_equals_the_reference(name, replay):
    run = Run(name, keep_graphs=not replay)
    loss, ratios = run.update(ON_POLICY, replay)
    expected = PROBLEMS[name]["first_update"]
    assert expected["ratio_all_one"]
    assert torch.equal(ratios, torch.ones_like(ratios))
    assert loss == pytest.approx(expected["loss"], abs=1e-14)
    close(run.policy.W.grad, expected["grad_W"])
    close(run.policy.b.grad, expected["grad_b"])


@pytest.mark.parametrize("name", PROBLEMS)
def test_replay_and_retain_give_the_same_bits(name):
    replayed, retained = Run(name), Run(name, keep_graphs=True)
    replayed.update(ON_POLICY, replay=True)
    retained.update(ON_POLICY, replay=False)
    assert torch.equal(replayed.policy.W.grad, retained.policy.W.grad)
    assert torch.equal(replayed.policy.b.grad, retained.policy.b.grad)


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradient_is_linear_in_the_advantages_known_before_the_reward(name):
    """Each sample's own gradient, backpropagated with the noise alone, then weighted."""
    run, problem = Run(name, keep_graphs=True), PROBLEMS[name]
    total_W, total_b = torch.zeros(4, 4).double(), torch.zeros(4).double()
    for index, step in zip(problem["trained_steps"], run.trained):
        cotangent = -on_policy_velocity_gradient(run.noise[index], step.coefficients)
        for sample, advantage in enumerate(run.advantages):
            grads = torch.autograd.grad(
                step.velocity[sample],
                (run.policy.W, run.policy.b),
                cotangent[sample],
                retain_graph=True,
            )
            total_W += advantage * grads[0] / 24
            total_b += advantage * grads[1] / 24
    close(total_W, problem["first_update"]["grad_W"])
    close(total_b, problem["first_update"]["grad_b"])


@pytest.mark.parametrize(("key", "clip_range"), [("clip_1e4", 1e-4), ("clip_1e2", 1e-2)])
@pytest.mark.parametrize("name", PROBLEMS)
def test_second_off_policy_update_equals_the_reference(name, key, clip_range):
    run, second = Run(name), PROBLEMS[name]["second_update"]
    run.update(ON_POLICY, replay=True)
    with torch.no_grad():
        for parameter in (run.policy.W, run.policy.b):
            parameter -= second["lr"] * parameter.grad
            parameter.grad = None
    loss, ratios = run.update(Objective(clip_range=clip_range), replay=True)
    expected = second[key]
    close(ratios, expected["ratio"])
    assert loss == pytest.approx(expected["loss"], rel=1e-9, abs=1e-13)
    close(run.policy.W.grad, expected["grad_W"])
    close(run.policy.b.grad, expected["grad_b"])
