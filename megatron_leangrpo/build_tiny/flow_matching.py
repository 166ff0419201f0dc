# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Pre-training of a tiny transformer by flow matching, whatever its family."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_leangrpo.build_tiny.muon import Muon

EMA_DECAY = 0.99

Velocity = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Of (model, latents [b, ...], times [b] in [0, 1], prompt indices [b])."""


def make_optimizers(model: nn.Module, steps: int) -> list[tuple[Any, Any]]:
    """Muon on the blocks' matrices and AdamW on the rest, each with its learning-rate schedule."""

    def factor(step: int) -> float:
        warm = min(1.0, (step + 1) / 30)
        left = (steps - step) / max(1.0, 0.4 * steps)
        return warm * max(0.02, min(1.0, left))

    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_block_matrix = "blocks." in name and parameter.ndim == 2
        (matrices if is_block_matrix else others).append(parameter)
    muon = Muon(matrices, lr=1e-2)
    adam = torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    return [(o, torch.optim.lr_scheduler.LambdaLR(o, factor)) for o in (muon, adam)]


def train(
    model: Any,
    velocity: Velocity,
    latents: Tensor,
    prompt_index: Tensor,
    steps: int,
    batch: int,
    seed: int,
    on_step: Callable[[float], None],
) -> Any:
    """Train on `latents` [n, ...] of prompts [n] with logit-normal times.

    Returns the exponential moving average of the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizers = make_optimizers(model, steps)
    average = copy.deepcopy(model).requires_grad_(False)
    model.train()
    for step in range(steps):
        rows = torch.randint(len(latents), (batch,), generator=generator)
        data = latents[rows]
        time = torch.sigmoid(torch.randn(batch, generator=generator))
        noise = torch.randn(data.shape, generator=generator)
        weight = time.view(-1, *[1] * (data.ndim - 1))
        noisy = (1 - weight) * data + weight * noise
        predicted = velocity(model, noisy, time, prompt_index[rows])
        loss = (predicted - (noise - data)).square().mean()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in optimizers:
            optimizer.step()
            scheduler.step()
        update_average(average, model, min(EMA_DECAY, (step + 1) / (step + 10)))
        on_step(float(loss.detach()))
    return average.eval()


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    """average <- decay * average + (1 - decay) * model."""
    for mean, current in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(current, 1 - decay)


@torch.no_grad()
def sample_latents(
    model: Any, velocity: Velocity, noise: Tensor, prompts: Tensor, steps: int = 8
) -> Tensor:
    """Euler integration from sigma 1 to 0 in equal steps (static shift 1)."""
    latents = noise
    for current, following in itertools.pairwise(torch.linspace(1, 0, steps + 1)):
        time = current.expand(len(latents))
        latents = latents + (following - current) * velocity(model, latents, time, prompts)
    return latents
