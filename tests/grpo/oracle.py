# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""GRPO once more, by plain autograd on diffusers' own transformer.

Written from the published formulas (reference/grpo.md sections 1, 2, 5 and 6), one trajectory after
the other, with none of the package's sigmas, kernels, advantages, objective or schedules. What a
run is *given* is taken from it: prompts and their embeddings, noise draws, which steps are trained,
the codec and the reward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Normal

from megatron_leangrpo.config import SamplingConfig
from megatron_leangrpo.diffusion.selection import StepPlan
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.models.flux.config import FluxConfig, to_diffusers_config
from megatron_leangrpo.parallel.noise import initial_noise, step_noise
from tests.grpo.tiny import Tensors


class Float64Sinusoid(torch.nn.Module):
    """diffusers computes its time embedding in float32 whatever the model's type."""

    def forward(self, values: Tensor) -> Tensor:
        rates = 10000.0 ** (-torch.arange(128, dtype=torch.float64) / 128)
        angles = values.double()[:, None] * rates
        return torch.cat([angles.cos(), angles.sin()], dim=1)


class Float64Positions(torch.nn.Module):
    """diffusers rounds its rotary tables to float32 whatever the model's type."""

    def __init__(self, axes: Sequence[int]) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = []
        for axis, width in enumerate(self.axes):
            rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
            angle = ids[:, axis, None].double() * rates
            angles.append(angle.repeat_interleave(2, dim=1))
        joined = torch.cat(angles, dim=1)
        return joined.cos(), joined.sin()


def _float64_rotation(x: Tensor, tables: tuple[Tensor, Tensor], sequence_dim: int = 1) -> Tensor:
    """diffusers rotates queries and keys in float32 whatever the model's type."""
    cos, sin = (table[None, :, None] for table in tables)
    pairs = x.unflatten(-1, (-1, 2))
    turned = torch.stack([-pairs[..., 1], pairs[..., 0]], dim=-1).flatten(-2)
    return x * cos + turned * sin


def precise(dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Within it, diffusers' FLUX computes in `dtype` throughout."""
    if dtype != torch.float64:
        return contextlib.nullcontext()
    place = "diffusers.models.transformers.transformer_flux.apply_rotary_emb"
    return mock.patch(place, _float64_rotation)


def diffusers_flux(config: FluxConfig, weights: Tensors) -> torch.nn.Module:
    """diffusers' transformer with these weights, in their precision throughout."""
    from diffusers import FluxTransformer2DModel

    arguments = {k: v for k, v in to_diffusers_config(config).items() if not k.startswith("_")}
    model = FluxTransformer2DModel(**arguments)
    # Not the model's own `to`, which warns.
    torch.nn.Module.to(model, next(iter(weights.values())).dtype)
    model.load_state_dict(weights)
    if model.dtype == torch.float64:
        model.time_text_embed.time_proj = Float64Sinusoid()
        model.pos_embed = Float64Positions(config.axes_dims_rope)
    return model


def sigmas_of(sampling: SamplingConfig, num_tokens: int) -> list[float]:
    """N + 1 noise levels in float64."""
    n = sampling.num_steps
    if sampling.sigma_schedule == "static_shift":
        times = [1 - i / n for i in range(n + 1)]
        return [sampling.shift * t / (1 + (sampling.shift - 1) * t) for t in times]
    mu = 0.5 + (num_tokens - 256) * (1.15 - 0.5) / (4096 - 256)
    times = np.linspace(1, 1 / n, n)
    # In this order the first one is exactly 1, which the guard of Flow-SDE asks for.
    return [math.exp(mu) / (math.exp(mu) + (1 / t - 1)) for t in times] + [0.0]


def truncated_timesteps(sampling: SamplingConfig) -> list[float]:
    """What DanceGRPO gives the model: its schedule is float32, and int() cuts float32 numbers."""
    times = torch.linspace(1, 0, sampling.num_steps + 1)
    sigmas = (sampling.shift * times) / (1 + (sampling.shift - 1) * times)
    return [int(sigma * 1000) / 1000 for sigma in sigmas[:-1]]


def transition(
    kernel: str, level: float | None, sigmas: Sequence[float], step: int, x: Tensor, v: Tensor
) -> tuple[Tensor, float, float]:
    """Mean of the next latent, its standard deviation, and the amplitude s of the noise."""
    sigma, after = sigmas[step], sigmas[step + 1]
    dt = after - sigma
    x0, x1 = x - sigma * v, x + (1 - sigma) * v
    if kernel == "cps":
        std = after * math.sin(level * math.pi / 2)
        return (1 - after) * x0 + math.sqrt(after**2 - std**2) * x1, std, std
    if kernel == "dance_sde":
        score = -(x - (1 - sigma) * x0) / sigma**2
        mean = x + v * dt - 0.5 * level**2 * score * dt
        return mean, level * math.sqrt(-dt), level
    if kernel == "flow_sde":
        s = level * math.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
    else:
        s = sigmas[-1] + (sigmas[1] - sigmas[-1]) * sigma
    mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, s * math.sqrt(-dt), s


def log_prob(kernel: str, mean: Tensor, std: float, x_next: Tensor) -> Tensor:
    """Mean over the elements of one sample."""
    if kernel == "cps":
        return -((x_next - mean) ** 2).mean()
    return Normal(mean, std).log_prob(x_next).mean()


def advantages(rewards: np.ndarray, convention: str) -> np.ndarray:
    """Advantages of float64 rewards [groups, members]."""
    by_group = rewards.mean(axis=1, keepdims=True)
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
    std = {
        (scope, ddof): rewards.std(axis=axis, keepdims=True, ddof=ddof)
        for scope, axis in (("group", 1), ("all", None))
        for ddof in (0, 1)
    }
    return {
        "flow_grpo_global_std": lambda: (rewards - by_group) / (std["all", 0] + 1e-4),
        "flow_grpo_group_std": lambda: (rewards - by_group) / (std["group", 0] + 1e-4),
        "dance_group": lambda: (rewards - by_group) / (std["group", 1] + 1e-8),
        "dance_global": lambda: (rewards - rewards.mean()) / (std["all", 1] + 1e-8),
        "verl_omni_global_std": lambda: (rewards - by_group) / (std["all", 1] + 1e-4),
        "verl_omni_group_std": lambda: (rewards - by_group) / (std["group", 1] + 1e-4),
        "flow_factory": lambda: (rewards - by_group) / np.maximum(std["group", 0], 1e-6),
        "dr_grpo": lambda: rewards - by_group,
        "leave_one_out": lambda: rewards - others,
    }[convention]()


@dataclass
class Step:
    """One trained transition of one trajectory."""

    index: int
    x: Tensor
    x_next: Tensor
    old_log_prob: Tensor
    old_mean: Tensor


@dataclass
class Trajectory:
    """One sample: what conditions it, its trained steps and where it ended."""

    group: int
    member: int
    steps: list[Step] = field(default_factory=list)
    latents: Tensor | None = None


class Oracle:
    """Rollout, rewards and gradient of one iteration of an experiment.

    Args:
        experiment: supplies the configuration and what a run is given.
        weights: of the policy that rolls out, under diffusers' names.
        iteration: whose prompts and noise are used.
    """

    def __init__(self, experiment: Experiment, weights: Tensors, iteration: int = 0) -> None:
        self.config, self.iteration = experiment.config, iteration
        self.given = experiment
        self.flux = experiment.architecture.config
        self.prompts = experiment.sampler.batch(iteration)
        sampling, size = self.config.sampling, experiment.settings.latent_shape[0]
        self.sigmas = sigmas_of(sampling, size)
        self.timesteps = self.sigmas[:-1]
        if sampling.truncate_timesteps:
            self.timesteps = truncated_timesteps(sampling)
        model = diffusers_flux(self.flux, weights)
        self.trajectories = [
            Trajectory(group, member)
            for group in range(len(self.prompts))
            for member in range(self.config.grpo.group_size)
        ]
        with torch.no_grad():
            self._roll_out(model)
        self.rewards = self._score()
        self.use_convention(self.config.grpo.advantage)

    def use_convention(self, name: str) -> None:
        """Weigh the same rollout by another advantage convention."""
        self.advantages, clip = advantages(self.rewards, name), self.config.grpo.adv_clip
        if clip is not None:
            self.advantages = self.advantages.clip(-clip, clip)

    def plan(self, trajectory: Trajectory) -> StepPlan:
        prompt = self.prompts[trajectory.group]
        return self.given.settings.selector.plan(
            self.config.seed, self.iteration, prompt.id, trajectory.member
        )

    def velocity(self, model, trajectories: Sequence[Trajectory], x: Tensor, step: int) -> Tensor:
        """diffusers' velocity of several trajectories at one step."""
        given = self.given.encode([self.prompts[t.group].text for t in trajectories])
        rows, columns = self.given.policy.grid
        ids = torch.zeros(rows, columns, 3)
        ids[..., 1], ids[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
        with precise(x.dtype):
            return model(
                hidden_states=x,
                encoder_hidden_states=given.prompt_embeds,
                pooled_projections=given.pooled,
                timestep=torch.full((len(x),), self.timesteps[step], dtype=x.dtype),
                img_ids=ids.reshape(-1, 3),
                txt_ids=torch.zeros(given.prompt_embeds.shape[1], 3),
                guidance=given.guidance,
                return_dict=False,
            )[0]

    def _roll_out(self, model) -> None:
        sampling, seed, everyone = self.config.sampling, self.config.seed, self.trajectories
        shape = self.given.settings.latent_shape
        ids = [(self.prompts[t.group].id, t.member) for t in everyone]
        x = torch.stack(
            [
                initial_noise(
                    seed, self.iteration, p, None if sampling.shared_initial_noise else m, shape
                )
                for p, m in ids
            ]
        ).to(model.dtype)
        for step in range(sampling.num_steps):
            v = self.velocity(model, everyone, x, step)
            after = []
            for row, trajectory in enumerate(everyone):
                plan = self.plan(trajectory)
                if step not in plan.stochastic:
                    after.append(x[row] + v[row] * (self.sigmas[step + 1] - self.sigmas[step]))
                    continue
                mean, std, _ = transition(
                    sampling.kernel, sampling.noise_level, self.sigmas, step, x[row], v[row]
                )
                noise = step_noise(seed, self.iteration, *ids[row], step, shape)
                after.append(mean + std * noise.to(mean))
                if step in plan.trained:
                    value = log_prob(sampling.kernel, mean, std, after[-1])
                    trajectory.steps.append(Step(step, x[row], after[-1], value, mean))
            if sampling.output == "predicted_x0" and step == sampling.num_steps - 1:
                after = list(x - self.sigmas[step] * v)
            x = torch.stack(after)
        for row, trajectory in enumerate(everyone):
            trajectory.latents = x[row]

    def _score(self) -> np.ndarray:
        latents = torch.stack([t.latents for t in self.trajectories])
        sampling, prompts = self.config.sampling, [self.prompts[t.group] for t in self.trajectories]
        images = self.given.codec.decode(latents, sampling.height, sampling.width)
        total = 0.0
        for name, weight in self.config.reward.weights.items():
            reward = self.given.scorer.reward.rewards[name]
            scores = reward(images, [p.text for p in prompts], [p.metadata for p in prompts])
            total = total + weight * torch.as_tensor(scores, dtype=torch.float64).numpy()
        return total.reshape(len(self.prompts), -1)

    def gradient(
        self,
        weights: Tensors,
        members: Sequence[tuple[int, int]] | None = None,
        reference: Tensors | None = None,
    ) -> tuple[Tensors, dict[str, float]]:
        """Gradient of the published clipped loss at `weights`, over some or all (group, member).

        Also the smallest and largest ratio and the share of clipped ratios.
        """
        model = diffusers_flux(self.flux, weights)
        frozen = None if reference is None else diffusers_flux(self.flux, reference)
        chosen = [t for t in self.trajectories if members is None or (t.group, t.member) in members]
        ratios = []
        for index in sorted({step.index for t in chosen for step in t.steps}):
            pairs = [(t, step) for t in chosen for step in t.steps if step.index == index]
            own = [t for t, _ in pairs]
            x = torch.stack([step.x for _, step in pairs])
            v = self.velocity(model, own, x, index)
            v_reference = None
            if frozen is not None:
                with torch.no_grad():
                    v_reference = self.velocity(frozen, own, x, index)
            loss = 0.0
            for row, (trajectory, step) in enumerate(pairs):
                against = None if v_reference is None else v_reference[row]
                term, ratio = self._loss(trajectory, step, v[row], against)
                loss = loss + term / (len(chosen) * len(trajectory.steps))
                ratios.append(ratio)
            loss.backward()
        clip = self.config.grpo.clip_range
        facts = {
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "clip_fraction": float(np.mean([abs(r - 1) > clip for r in ratios])),
            "clip_margin": min(abs(abs(r - 1) - clip) for r in ratios) / clip,
        }
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters()
        }
        return gradients, facts

    def _loss(
        self, trajectory: Trajectory, step: Step, v: Tensor, v_reference: Tensor | None
    ) -> tuple[Tensor, float]:
        """Loss of one transition, and the ratio that the clip acts on."""
        sampling, grpo = self.config.sampling, self.config.grpo
        rule = (sampling.kernel, sampling.noise_level, self.sigmas, step.index)
        mean, std, s = transition(*rule, step.x, v)
        dt = self.sigmas[step.index + 1] - self.sigmas[step.index]
        difference = log_prob(sampling.kernel, mean, std, step.x_next) - step.old_log_prob
        if grpo.ratio_norm == "grpo_guard":
            bias = ((mean - step.old_mean) ** 2).mean() / (2 * std**2)
            difference = (difference + bias) * std
        elif grpo.ratio_norm == "flow_factory":
            difference = difference * std + ((mean - step.old_mean) ** 2).mean() / (2 * std)
        advantage = self.advantages[trajectory.group, trajectory.member]
        ratio, clip = difference.exp(), grpo.clip_range
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))
        if grpo.ratio_norm == "grpo_guard":
            loss = loss / -dt
        if v_reference is not None:
            reference_mean, _, _ = transition(*rule, step.x, v_reference)
            square = ((mean - reference_mean) ** 2).mean()
            kl = {
                "flow_grpo": lambda: square / (2 * s**2),
                "exact": lambda: square / (2 * std**2),
                "mean_mse": lambda: square,
                "velocity_mse": lambda: ((v - v_reference) ** 2).mean(),
            }[grpo.kl_form]()
            loss = loss + grpo.kl_beta * kl
        return loss, ratio.item()
