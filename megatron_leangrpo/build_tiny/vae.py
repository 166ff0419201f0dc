# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The tiny AutoencoderKL (side / 4, 4 channels) and its training."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_leangrpo.build_tiny.muon import Muon
from megatron_leangrpo.build_tiny.rendering import TinyTask

BATCH = 32
KL_WEIGHT = 1e-4
COLOR_WEIGHT = 4.0


def make_vae() -> Any:
    """0.23 M parameters; no attention, no quantisation convolutions, as in FLUX's own VAE."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def reconstruction_loss(output: Tensor, target: Tensor) -> Tensor:
    """L1 + squared error + L1 of the chroma, [n, 3, ...] in [-1, 1].

    Coloured pixels are few and decide what is seen, so they weigh more; without the chroma term the
    hue is learnt last.
    """
    chroma = target.amax(1, keepdim=True) - target.amin(1, keepdim=True)
    weight = torch.where(chroma > 0.1, COLOR_WEIGHT, 1.0)
    error = output - target
    chroma_error = error - error.mean(1, keepdim=True)
    return (weight * (error.abs() + error.square() + chroma_error.abs())).mean()


def train_vae(
    vae: Any,
    task: TinyTask,
    steps: int,
    seed: int,
    on_step: Callable[[float], None],
    batch: int = BATCH,
) -> None:
    """Train in place.

    Images go in and out as [n, 3, H, W] and videos as [n, 3, frames, H, W], in [-1, 1], the
    convention of diffusers' pipelines.
    """
    vae.train()
    # Wan's norms have scales of shape [channels, 1, 1, 1].
    matrices = [parameter for parameter in vae.parameters() if parameter[0].numel() > 1]
    vectors = [parameter for parameter in vae.parameters() if parameter[0].numel() == 1]
    optimizers = [
        Muon(matrices, lr=5e-3),
        torch.optim.AdamW(vectors, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0),
    ]
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / 20, 1.0, 0.02 + 2.5 * (1 - step / steps))
        )
        for optimizer in optimizers
    ]
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        indices = torch.randint(len(task.prompts), (batch,), generator=generator).tolist()
        images = task.render(indices, seed=seed * 100_003 + step) * 2 - 1
        posterior = vae.encode(images).latent_dist
        output = vae.decode(posterior.sample(generator=generator)).sample
        loss = reconstruction_loss(output, images) + KL_WEIGHT * posterior.kl().mean()
        vae.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        on_step(float(loss.detach()))
    vae.eval().requires_grad_(False)


@torch.no_grad()
def encode(vae: Any, images: Tensor, batch: int = 256) -> Tensor:
    """Mean latents [n, 4, ..., H/4, W/4] of images or videos in [0, 1], not normalised."""
    parts = [vae.encode(chunk * 2 - 1).latent_dist.mode() for chunk in images.split(batch)]
    return torch.cat(parts)


@torch.no_grad()
def peak_signal_to_noise(vae: Any, images: Tensor) -> float:
    """Reconstruction quality in dB, in [0, 1]; under 26 dB colours are wrong."""
    output = vae.decode(vae.encode(images * 2 - 1).latent_dist.mode()).sample.clamp(-1, 1)
    error = ((output + 1) / 2 - images).square().mean()
    return float(-10 * error.log10())
