# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The AutoencoderKL of a FLUX pipeline folder as a codec."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_leangrpo.codecs.base import token_grid
from megatron_leangrpo.codecs.packing import unpack_latents

# Pixels decoded at once: memory must not grow with the batch.
PIXELS_PER_CHUNK = 2**20


class VaeCodec:
    """Packing, scaling and decoding exactly as FluxPipeline does it, without tiling."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae.eval().requires_grad_(False)
        self.multiple = 2 ** len(vae.config.block_out_channels)
        self._channels = 4 * vae.config.latent_channels

    @classmethod
    def from_pipeline(
        cls,
        folder: str | Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "VaeCodec":
        """Load only the VAE of a folder written by FluxPipeline.save_pretrained."""
        from diffusers import AutoencoderKL

        folder = Path(folder) / "vae"
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"model.base: {folder} is not the VAE of a FLUX pipeline, config.json is missing"
            )
        try:
            vae, report = AutoencoderKL.from_pretrained(
                folder, local_files_only=True, output_loading_info=True
            )
        except Exception as error:
            cause = " ".join(str(error).split())
            raise ValueError(f"model.base: {folder} cannot be loaded: {cause:.300}") from error
        if missing := sorted(report["missing_keys"]):
            # diffusers would fill them with random numbers.
            raise ValueError(
                f"model.base: {folder} misses {len(missing)} of the VAE's tensors, such as "
                f"{missing[0]}"
            )
        return cls(vae.to(device, dtype))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens; ValueError for a size that does not fit."""
        return token_grid(height, width, self.multiple)

    def latent_shape(self, height: int, width: int) -> tuple[int, int]:
        """Tokens and channels of the packed latents."""
        rows, columns = self.grid(height, width)
        return rows * columns, self._channels

    @torch.no_grad()
    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Packed latents [b, s, c] -> images [b, 3, H, W] in [0, 1], float32."""
        config = self.vae.config
        unpacked = unpack_latents(latents, *self.grid(height, width))
        unpacked = (unpacked / config.scaling_factor + config.shift_factor).to(self.vae.dtype)
        chunk = max(1, PIXELS_PER_CHUNK // (height * width))
        parts = [self.vae.decode(part).sample.float() for part in unpacked.split(chunk)]
        return (torch.cat(parts) / 2 + 0.5).clamp(0, 1)
