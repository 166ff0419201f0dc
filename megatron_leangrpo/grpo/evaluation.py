# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Evaluation: deterministic samples of fixed prompts from fixed noise, under the run's rewards."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.conditioning.prompts import Prompt
from megatron_leangrpo.config import EvaluationConfig
from megatron_leangrpo.diffusion.sampler import CHECKED, Sampling
from megatron_leangrpo.diffusion.selection import DETERMINISTIC
from megatron_leangrpo.diffusion.sigmas import SigmaSchedule
from megatron_leangrpo.grpo.intervals import Interval, mean_over_prompts
from megatron_leangrpo.grpo.passes import WholeModel
from megatron_leangrpo.grpo.pipelined import PipelinedModel
from megatron_leangrpo.grpo.placement import Wave
from megatron_leangrpo.grpo.rollout import WaveRollout
from megatron_leangrpo.grpo.scoring import Scorer
from megatron_leangrpo.models.experts import idle_in_host
from megatron_leangrpo.operations.finite import check_steps
from megatron_leangrpo.parallel.noise import evaluation_noise
from megatron_leangrpo.reporting.pictures import Sample


@dataclass(frozen=True)
class Evaluation:
    """Means over all samples, what they are means of, and the first pictures for a grid."""

    reward_mean: float
    rewards: dict[str, float]
    total: Interval
    """Of the weighted sum, over prompts."""
    intervals: dict[str, Interval]
    """Of each reward."""
    correct: float | None
    """Share that every reward with a verdict calls right."""
    prompt_ids: list[int]
    """Of each sample, which are the rows of what follows."""
    scores: torch.Tensor
    """[samples, rewards] in float64, NaN where a reward has failed."""
    inspected: torch.Tensor | None
    """[samples, numbers]: what `inspect` gave; only the logging rank has all."""
    samples: list[Sample]
    """The first ones, sample by sample, prompts in order; only the logging rank has all."""


class Evaluator:
    """Samples `samples_per_prompt` images of each prompt; the same ones whatever the layout."""

    def __init__(
        self,
        passes: WholeModel | PipelinedModel,
        schedule: SigmaSchedule,
        config: EvaluationConfig,
        prompts: Sequence[Prompt],
        encode: Callable[[Sequence[str]], object],
        scorer: Scorer,
        latent_shape: tuple[int, ...],
    ) -> None:
        self.passes, self.schedule, self.config = passes, schedule, config
        self.encode, self.scorer, self.latent_shape = encode, scorer, latent_shape
        chosen = prompts[: config.max_prompts]
        self.items = [(p, sample) for sample in range(config.samples_per_prompt) for p in chosen]

    @torch.no_grad()
    def run(
        self,
        on_batch: Callable[[int], None] = lambda images: None,
        inspect: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Evaluation:
        """Evaluate the policy's current weights (a collective); `on_batch` reports progress.

        `inspect` makes numbers `[b, numbers]` of decoded samples.
        """
        scorer, shown = self.scorer, min(self.config.grid_images, len(self.items))
        table = torch.zeros(len(self.items), len(scorer.names) + 1, dtype=torch.float64)
        images = torch.zeros(shown, *scorer.sample_shape, dtype=torch.uint8)
        inspected = None
        if inspect is not None:
            numbers = inspect(torch.zeros(1, *scorer.sample_shape)).shape[1]
            inspected = torch.zeros(len(self.items), numbers)
        for batch, latents in self._sampled():
            rewards, correct, pictures = scorer.score(latents, [self.items[i][0] for i in batch])
            table[batch] = torch.cat([rewards, correct[:, None]], dim=1)
            if pictures is not None:
                if inspected is not None:
                    inspected[batch] = inspect(pictures).float().cpu()
                for index, picture in zip(batch, pictures):
                    if index < shown:
                        images[index] = (picture * 255).round().to(torch.uint8)
            on_batch(len(batch))
        table = _sum_over_ranks(table)
        # One by one: 40 videos of 81 frames have gigabytes, which the device may not have left.
        for image in images:
            image.copy_(_sum_over_ranks(image))
        inspected = None if inspected is None else _sum_over_ranks(inspected)
        return self._summarize(table, inspected, images)

    def _summarize(
        self, table: torch.Tensor, inspected: torch.Tensor | None, images: torch.Tensor
    ) -> Evaluation:
        names, weights = self.scorer.names, torch.tensor(self.scorer.weights).double()
        scores, correct = table[:, :-1], table[:, -1].tolist()
        means = table[scores.isfinite().all(dim=1)].mean(dim=0)
        prompt_ids = [prompt.id for prompt, _ in self.items]
        return Evaluation(
            reward_mean=float(means[:-1] @ weights),
            rewards=dict(zip(names, means.tolist(), strict=False)),
            total=mean_over_prompts(scores @ weights, prompt_ids),
            intervals={
                n: mean_over_prompts(column, prompt_ids) for n, column in zip(names, scores.T)
            },
            correct=None if means[-1].isnan() else float(means[-1]),
            prompt_ids=prompt_ids,
            scores=scores,
            inspected=inspected,
            samples=[
                Sample(image, prompt.text, reward, None if math.isnan(right) else bool(right))
                for image, (prompt, _), reward, right in zip(
                    images, self.items, (scores @ weights).tolist(), correct, strict=False
                )
            ],
        )

    def _sampled(self) -> Iterator[tuple[list[int], torch.Tensor]]:
        """This rank's items in batches, and their latents; as many at once as are in flight."""
        size = self.config.micro_batch_size
        own = range(platform.dp_rank(), len(self.items), platform.dp_size())
        batches = [list(own[start : start + size]) for start in range(0, len(own), size)]
        at_once = self.passes.waves_in_flight
        for first in range(0, len(batches), at_once):
            together = batches[first : first + at_once]
            with idle_in_host(self.passes.policy.model):
                rollouts = [self._rollout(n, batch) for n, batch in enumerate(together)]
                trajectories = self.passes.roll_out(rollouts)
            for batch, trajectory in zip(together, trajectories):
                items = [self.items[i] for i in batch]
                samples = [f"prompt {prompt.id} sample {number}" for prompt, number in items]
                check_steps(trajectory.finite, CHECKED, samples, "an evaluation")
                yield batch, trajectory.latents

    def _rollout(self, number: int, batch: Sequence[int]) -> WaveRollout:
        items = [self.items[i] for i in batch]
        dtype = self.passes.policy.latent_dtype
        x = torch.stack(
            [
                evaluation_noise(self.config.seed, prompt.id, sample, self.latent_shape, dtype)
                for prompt, sample in items
            ]
        ).to(platform.device())
        plans, ode = [DETERMINISTIC] * len(items), ("ode", None)
        sampling = Sampling(x, self.schedule, *ode, plans, noise=lambda step: torch.zeros_like(x))
        conditioning = self.encode([prompt.text for prompt, _ in items])
        return WaveRollout(sampling, Wave(number, 0, ()), conditioning, windows=())


def _sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to(platform.device())
    dist.all_reduce(tensor, group=platform.dp_group())
    return tensor.cpu()
