# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The tiny FluxTransformer2DModel and its pre-training by flow matching."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_leangrpo.build_tiny.muon import Muon

GUIDANCE = 3.5
MAX_SEQUENCE_LENGTH = 8
BATCH = 64
EMA_DECAY = 0.99


def make_transformer(text_dim: int) -> Any:
    """0.86 M parameters: 1 double and 3 single blocks, 4 heads of 24, guidance as in FLUX.1-dev."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=3,
        attention_head_dim=24,
        num_attention_heads=4,
        joint_attention_dim=text_dim,
        pooled_projection_dim=text_dim,
        guidance_embeds=True,
        axes_dims_rope=(8, 8, 8),
    )


def image_ids(rows: int, columns: int) -> Tensor:
    """Rotary coordinates [rows * columns, 3]: (0, row, column)."""
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] = torch.arange(rows)[:, None]
    ids[..., 2] = torch.arange(columns)[None, :]
    return ids.view(-1, 3)


def velocity(
    model: Any, latents: Tensor, time: Tensor, prompt_embeds: Tensor, pooled: Tensor
) -> Tensor:
    """The velocity of square packed latents [b, s, 16] at times [b] in [0, 1]."""
    side = round(latents.shape[1] ** 0.5)
    return model(
        hidden_states=latents,
        timestep=time,
        guidance=torch.full_like(time, GUIDANCE),
        encoder_hidden_states=prompt_embeds,
        pooled_projections=pooled,
        txt_ids=torch.zeros(prompt_embeds.shape[1], 3),
        img_ids=image_ids(side, side),
        return_dict=False,
    )[0]


@dataclass(frozen=True)
class Corpus:
    """Normalised packed latents [n, s, 16], their prompt indices, the prompts' embeddings."""

    latents: Tensor
    prompt_index: Tensor
    prompt_embeds: Tensor
    pooled: Tensor


def make_optimizers(model: nn.Module, steps: int) -> list[tuple[Any, Any]]:
    """Muon on the blocks' matrices and AdamW on the rest, each with its learning-rate schedule."""

    def factor(step: int) -> float:
        warm = min(1.0, (step + 1) / 30)
        left = (steps - step) / max(1.0, 0.4 * steps)
        return warm * max(0.02, min(1.0, left))

    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_block_matrix = "transformer_blocks" in name and parameter.ndim == 2
        (matrices if is_block_matrix else others).append(parameter)
    muon = Muon(matrices, lr=1e-2)
    adam = torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    return [(o, torch.optim.lr_scheduler.LambdaLR(o, factor)) for o in (muon, adam)]


def train_transformer(
    model: Any, corpus: Corpus, steps: int, seed: int, on_step: Callable[[float], None]
) -> Any:
    """Train by flow matching with logit-normal times; returns the exponential moving average."""
    generator = torch.Generator().manual_seed(seed)
    optimizers = make_optimizers(model, steps)
    average = copy.deepcopy(model).requires_grad_(False)
    model.train()
    for step in range(steps):
        rows = torch.randint(len(corpus.latents), (BATCH,), generator=generator)
        prompt = corpus.prompt_index[rows]
        data = corpus.latents[rows]
        time = torch.sigmoid(torch.randn(BATCH, generator=generator))
        noise = torch.randn(data.shape, generator=generator)
        weight = time[:, None, None]
        noisy = (1 - weight) * data + weight * noise
        predicted = velocity(
            model, noisy, time, corpus.prompt_embeds[prompt], corpus.pooled[prompt]
        )
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
    model: Any, noise: Tensor, prompt_embeds: Tensor, pooled: Tensor, steps: int = 8
) -> Tensor:
    """Euler integration from sigma 1 to 0 in equal steps (static shift 1)."""
    sigmas = torch.linspace(1, 0, steps + 1)
    latents = noise
    for current, following in itertools.pairwise(sigmas):
        time = current.expand(len(latents))
        latents = latents + (following - current) * velocity(
            model, latents, time, prompt_embeds, pooled
        )
    return latents
