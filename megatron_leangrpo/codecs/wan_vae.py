# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The AutoencoderKLWan of a Wan pipeline folder as a codec."""

from typing import Any

import torch
from torch import Tensor

from megatron_leangrpo.codecs.loading import PipelineVae
from megatron_leangrpo.codecs.packing import unpack_video_latents

# Patches of the transformer, a side.
PATCH = 2


class WanVaeCodec(PipelineVae):
    """Un-packing, scaling and decoding exactly as WanPipeline does it.

    The number of frames follows from the number of tokens.
    """

    makes_videos = True
    vae_class, pipeline = "AutoencoderKLWan", "Wan"

    def __init__(self, vae: Any) -> None:
        config = vae.config
        super().__init__(vae, PATCH * config.scale_factor_spatial)
        # 1 / std and then a division, because diffusers rounds that way.
        shape = (1, config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(config.latents_mean).view(shape)
        self._inverse_std = 1.0 / torch.tensor(config.latents_std).view(shape)

    @torch.no_grad()
    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Packed latents [b, s, c] -> videos [b, frames, 3, H, W] in [0, 1], float32."""
        unpacked = unpack_video_latents(latents, *self.grid(height, width)).to(self.vae.dtype)
        mean, inverse_std = (t.to(unpacked) for t in (self._mean, self._inverse_std))
        unpacked = unpacked / inverse_std + mean
        frames = 1 + self.vae.config.scale_factor_temporal * (unpacked.shape[2] - 1)
        return self.decode_unpacked(unpacked, frames * height * width).transpose(1, 2)
