# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The AutoencoderKLWan of a Wan pipeline folder as a codec."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_leangrpo.codecs.base import token_grid
from megatron_leangrpo.codecs.loading import load_vae
from megatron_leangrpo.codecs.packing import unpack_video_latents

# Pixels decoded at once: memory must not grow with the batch. One 480 x 832 x 81 video has 32 M.
PIXELS_PER_CHUNK = 2**20
# Patches of the transformer, a side.
PATCH = 2


class WanVaeCodec:
    """Un-packing, scaling and decoding exactly as WanPipeline does it, without tiling.

    The number of frames follows from the number of tokens.
    """

    makes_videos = True

    def __init__(self, vae: Any) -> None:
        self.vae = vae.eval().requires_grad_(False)
        self.multiple = PATCH * vae.config.scale_factor_spatial
        config = vae.config
        # 1 / std and then a division, because diffusers rounds that way.
        shape = (1, config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(config.latents_mean).view(shape)
        self._inverse_std = 1.0 / torch.tensor(config.latents_std).view(shape)

    @classmethod
    def from_pipeline(
        cls,
        folder: str | Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "WanVaeCodec":
        """Load only the VAE of a folder written by WanPipeline.save_pretrained."""
        from diffusers import AutoencoderKLWan

        return cls(load_vae(AutoencoderKLWan, folder, "Wan").to(device, dtype))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens of a frame; ValueError for a size that does not fit."""
        return token_grid(height, width, self.multiple)

    @torch.no_grad()
    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Packed latents [b, s, c] -> videos [b, frames, 3, H, W] in [0, 1], float32."""
        vae = self.vae
        unpacked = unpack_video_latents(latents, *self.grid(height, width)).to(vae.dtype)
        mean, inverse_std = (t.to(unpacked) for t in (self._mean, self._inverse_std))
        unpacked = unpacked / inverse_std + mean
        frames = 1 + vae.config.scale_factor_temporal * (unpacked.shape[2] - 1)
        chunk = max(1, PIXELS_PER_CHUNK // (frames * height * width))
        parts = [vae.decode(part).sample.float() for part in unpacked.split(chunk)]
        return (torch.cat(parts) / 2 + 0.5).clamp(0, 1).transpose(1, 2)
