# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Replay as DanceGRPO and Flow-GRPO run it: diffusers' transformer, plain autograd, no Megatron.

Roll out without gradients; once the rewards are known, run every trained step again with them and
call backward at each. The arithmetic is the published one; prompts, noise, trained steps and
advantages are those of the experiment it is measured against.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_leangrpo import platform
from megatron_leangrpo.conditioning.encoders import Conditioning
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.grpo.placement import Group
from megatron_leangrpo.parallel.noise import initial_noise_batch, step_noise_batch
from tests.benchmarks.diffusers_models import MODELS
from tests.grpo.oracle import sigmas_of, transition, truncated_timesteps


@dataclass(frozen=True)
class DrawnStep:
    """A trained step of a micro-batch as the rollout left it."""

    index: int
    x: Tensor
    x_next: Tensor
    old_log_prob: Tensor


@dataclass
class MicroBatch:
    """Samples in one forward: the keys of their noise, what conditions and what weighs them."""

    samples: list[tuple[int, int]]
    conditioning: Conditioning
    advantages: Tensor
    steps: list[DrawnStep] = field(default_factory=list)


def micro_batches(experiment: Experiment, advantages: Tensor) -> list[MicroBatch]:
    """This rank's micro-batches of the first iteration; `advantages` of its samples in order."""
    groups = [Group(i, prompt) for i, prompt in enumerate(experiment.sampler.batch(0))]
    batches = []
    for wave in experiment.runner("replay").place(groups, 0).waves:
        texts = [groups[slot.group].prompt.text for slot in wave.slots]
        members = experiment.config.grpo.group_size
        own = [slot.group * members + slot.member for slot in wave.slots]
        samples = [(slot.prompt_id, slot.member) for slot in wave.slots]
        batches.append(MicroBatch(samples, experiment.encode(texts), advantages[own].float()))
    return batches


class DiffusersLoop:
    """One GRPO iteration over diffusers' transformer.

    Args:
        experiment: supplies the weights and what a run is given.
        batches: this rank's micro-batches.
        checkpointing: diffusers' own gradient checkpointing.
    """

    def __init__(
        self, experiment: Experiment, batches: Sequence[MicroBatch], checkpointing: bool
    ) -> None:
        self.velocity = MODELS[experiment.config.model.family](experiment)
        self.model = self.velocity.transformer
        if checkpointing:
            self.model.enable_gradient_checkpointing()
        self.batches, self.grpo = list(batches), experiment.config.grpo
        self.seed, self.shape = experiment.settings.seed, experiment.settings.latent_shape
        self.sampling = experiment.config.sampling
        self.sigmas = sigmas_of(self.sampling, self.shape[0])
        self.timesteps = truncated_timesteps(self.sampling)
        prompt_id, member = self.batches[0].samples[0]
        plan = experiment.settings.selector.plan(self.seed, 0, prompt_id, member)
        self.trained = frozenset(plan.trained)

    def allocate_gradients(self) -> None:
        """Keep the gradients allocated between iterations, as Megatron's buffers are."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def run(self) -> float:
        """Roll out and replay; the seconds of both. The gradient is in the parameters then."""
        self.model.zero_grad(set_to_none=False)
        platform.synchronize()
        start = time.perf_counter()
        latents = [self._roll_out(batch) for batch in self.batches]
        for batch in self.batches:
            for step in batch.steps:
                self._loss(batch, step).backward()
            batch.steps.clear()
        platform.synchronize()
        seconds = time.perf_counter() - start
        assert all(x.isfinite().all() for x in latents)
        return seconds

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of the last run."""
        return {name: p.grad.clone() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def _roll_out(self, batch: MicroBatch) -> Tensor:
        starts = [
            (prompt, None if self.sampling.shared_initial_noise else member)
            for prompt, member in batch.samples
        ]
        x = initial_noise_batch(self.seed, 0, starts, self.shape)
        for index in range(self.sampling.num_steps):
            velocity = self._velocity(batch, x, index)
            mean, std = self._transition(index, x, velocity)
            noise = step_noise_batch(self.seed, 0, batch.samples, index, self.shape)
            x_next = mean + std * noise
            if index in self.trained:
                value = _log_prob(mean, std, x_next)
                batch.steps.append(DrawnStep(index, x, x_next, value))
            if index == self.sampling.num_steps - 1:
                return x - self.sigmas[index] * velocity
            x = x_next
        raise AssertionError("a rollout has steps")

    def _loss(self, batch: MicroBatch, step: DrawnStep) -> Tensor:
        mean, std = self._transition(step.index, step.x, self._velocity(batch, step.x, step.index))
        ratio = (_log_prob(mean, std, step.x_next) - step.old_log_prob).exp()
        clip, bound = self.grpo.clip_range, self.grpo.adv_clip
        advantages = batch.advantages.clamp(-bound, bound)
        losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))
        samples = sum(len(batch.samples) for batch in self.batches)
        return losses.sum() / (samples * len(self.trained))

    def _velocity(self, batch: MicroBatch, x: Tensor, index: int) -> Tensor:
        timestep = torch.full((len(x),), self.timesteps[index])
        return self.velocity(x, timestep, batch.conditioning)

    def _transition(self, index: int, x: Tensor, velocity: Tensor) -> tuple[Tensor, float]:
        kernel, level = self.sampling.kernel, self.sampling.noise_level
        mean, std, _ = transition(kernel, level, self.sigmas, index, x, velocity)
        return mean, std


def _log_prob(mean: Tensor, std: float, x_next: Tensor) -> Tensor:
    """Gaussian log-probability of each sample, a mean over its elements."""
    squares = (x_next - mean) ** 2 / (2 * std**2)
    return -squares.flatten(1).mean(1) - math.log(std) - 0.5 * math.log(2 * math.pi)
