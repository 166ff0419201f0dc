# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The AutoencoderKL of a FLUX pipeline folder as a codec."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_leangrpo.codecs.base import token_grid
from megatron_leangrpo.codecs.loading import load_vae
from megatron_leangrpo.codecs.packing import unpack_latents

# Pixels decoded at once: memory must not grow with the batch.
PIXELS_PER_CHUNK = 2**20


class VaeCodec:
    """Packing, scaling and decoding exactly as FluxPipeline does it, without tiling."""

    makes_videos = False

    def __init__(self, vae: Any) -> None:
        self.vae = vae.eval().requires_grad_(False)
        self.multiple = 2 ** len(vae.config.block_out_channels)

    @classmethod
    def from_pipeline(
        cls,
        folder: str | Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "VaeCodec":
        """Load only the VAE of a folder written by FluxPipeline.save_pretrained."""
        from diffusers import AutoencoderKL

        return cls(load_vae(AutoencoderKL, folder, "FLUX").to(device, dtype))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens; ValueError for a size that does not fit."""
        return token_grid(height, width, self.multiple)

    @torch.no_grad()
    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Packed latents [b, s, c] -> images [b, 3, H, W] in [0, 1], float32."""
        config = self.vae.config
        unpacked = unpack_latents(latents, *self.grid(height, width))
        unpacked = (unpacked / config.scaling_factor + config.shift_factor).to(self.vae.dtype)
        chunk = max(1, PIXELS_PER_CHUNK // (height * width))
        parts = [self.vae.decode(part).sample.float() for part in unpacked.split(chunk)]
        return (torch.cat(parts) / 2 + 0.5).clamp(0, 1)
