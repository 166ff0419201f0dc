# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Evaluation: deterministic samples of fixed prompts from fixed noise, under the run's rewards."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.conditioning.prompts import Prompt
from megatron_leangrpo.config import EvaluationConfig
from megatron_leangrpo.diffusion.sampler import rollout
from megatron_leangrpo.diffusion.selection import DETERMINISTIC
from megatron_leangrpo.diffusion.sigmas import SigmaSchedule
from megatron_leangrpo.grpo.policy import Policy
from megatron_leangrpo.grpo.scoring import Scorer
from megatron_leangrpo.models.experts import idle_in_host
from megatron_leangrpo.parallel.noise import evaluation_noise
from megatron_leangrpo.reporting.pictures import Sample


@dataclass(frozen=True)
class Evaluation:
    """Means over all samples, and the first pictures for a grid."""

    reward_mean: float
    rewards: dict[str, float]
    correct: float | None
    """Share that every reward with a verdict calls right."""
    samples: list[Sample]
    """The first pictures, sample by sample, prompts in order; only the logging rank has all."""


class Evaluator:
    """Samples `samples_per_prompt` images of each prompt; the same ones whatever the layout."""

    def __init__(
        self,
        policy: Policy,
        schedule: SigmaSchedule,
        config: EvaluationConfig,
        prompts: Sequence[Prompt],
        encode: Callable[[Sequence[str]], object],
        scorer: Scorer,
        latent_shape: tuple[int, ...],
    ) -> None:
        self.policy, self.schedule, self.config = policy, schedule, config
        self.encode, self.scorer, self.latent_shape = encode, scorer, latent_shape
        chosen = prompts[: config.max_prompts]
        self.items = [(p, sample) for sample in range(config.samples_per_prompt) for p in chosen]

    @torch.no_grad()
    def run(self, on_batch: Callable[[int], None] = lambda images: None) -> Evaluation:
        """Evaluate the policy's current weights (a collective); `on_batch` reports progress."""
        scorer, shown = self.scorer, min(self.config.grid_images, len(self.items))
        device = platform.device()
        sums = torch.zeros(len(scorer.names) + 2, dtype=torch.float64)
        images = torch.zeros(shown, 3, scorer.height, scorer.width, dtype=torch.uint8)
        verdicts = torch.zeros(shown, 2, dtype=torch.float64)
        own = range(platform.dp_rank(), len(self.items), platform.dp_size())
        for start in range(0, len(own), self.config.micro_batch_size):
            batch = own[start : start + self.config.micro_batch_size]
            rewards, correct, pictures = scorer.score(
                self._sample(batch), [self.items[i][0] for i in batch]
            )
            rows = torch.cat([rewards, correct[:, None], torch.ones_like(correct[:, None])], dim=1)
            sums += rows[rewards.isfinite().all(dim=1)].sum(dim=0)
            for row, index in enumerate(batch):
                if index < shown and pictures is not None:
                    images[index] = (pictures[row] * 255).round().to(torch.uint8)
                    verdicts[index, 0] = rewards[row] @ torch.tensor(scorer.weights).double()
                    verdicts[index, 1] = correct[row]
            on_batch(len(batch))
        sums, images, verdicts = (t.to(device) for t in (sums, images, verdicts))
        for tensor in (sums, images, verdicts):
            dist.all_reduce(tensor, group=platform.dp_group())
        means = (sums[:-1] / sums[-1]).tolist()
        rewards = dict(zip(scorer.names, means, strict=False))
        return Evaluation(
            reward_mean=sum(w * rewards[n] for n, w in zip(scorer.names, scorer.weights)),
            rewards=rewards,
            correct=None if math.isnan(means[-1]) else means[-1],
            samples=[
                Sample(image / 255, prompt.text, reward, None if math.isnan(right) else bool(right))
                for image, (prompt, _), (reward, right) in zip(
                    images.cpu(), self.items[:shown], verdicts.tolist()
                )
            ],
        )

    def _sample(self, batch: Sequence[int]) -> torch.Tensor:
        items = [self.items[i] for i in batch]
        conditioning = self.encode([prompt.text for prompt, _ in items])
        dtype = self.policy.latent_dtype
        x = torch.stack(
            [
                evaluation_noise(self.config.seed, prompt.id, sample, self.latent_shape, dtype)
                for prompt, sample in items
            ]
        ).to(platform.device())
        with idle_in_host(self.policy.model):
            return rollout(
                lambda x, timestep: self.policy(x, timestep, conditioning),
                x,
                self.schedule,
                "ode",
                None,
                [DETERMINISTIC] * len(items),
                noise=lambda step: torch.zeros_like(x),
            )
