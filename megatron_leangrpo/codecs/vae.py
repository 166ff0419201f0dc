# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The AutoencoderKL of a FLUX pipeline folder as a codec."""

from typing import Any

import torch
from torch import Tensor

from megatron_leangrpo.codecs.loading import PipelineVae
from megatron_leangrpo.codecs.packing import unpack_latents


class VaeCodec(PipelineVae):
    """Packing, scaling and decoding exactly as FluxPipeline does it."""

    makes_videos = False
    vae_class, pipeline = "AutoencoderKL", "FLUX"

    def __init__(self, vae: Any) -> None:
        super().__init__(vae, 2 ** len(vae.config.block_out_channels))

    @torch.no_grad()
    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Packed latents [b, s, c] -> images [b, 3, H, W] in [0, 1], float32."""
        config = self.vae.config
        unpacked = unpack_latents(latents, *self.grid(height, width))
        unpacked = (unpacked / config.scaling_factor + config.shift_factor).to(self.vae.dtype)
        return self.decode_unpacked(unpacked, height * width)
