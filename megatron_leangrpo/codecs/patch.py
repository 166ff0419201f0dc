# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A codec without parameters, for models with random weights."""

import torch
from torch import Tensor

from megatron_leangrpo.codecs.base import token_grid
from megatron_leangrpo.codecs.packing import unpack_latents


class PatchCodec:
    """Tokens in FLUX's layout whose first three latent channels are shown as colours.

    Args:
        channels: per token, four times the latent channels (64 for FLUX).
        patch: pixels per token side (16 for FLUX).
    """

    makes_videos = False

    def __init__(self, channels: int = 64, patch: int = 16) -> None:
        if channels % 4 or channels < 12:
            raise ValueError(f"channels={channels}: must be a multiple of 4 and at least 12")
        if patch % 2 or patch < 2:
            raise ValueError(f"patch={patch}: must be even and positive")
        self.multiple = patch

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens; ValueError for a size that does not fit."""
        return token_grid(height, width, self.multiple)

    @torch.no_grad()
    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Packed latents [b, s, c] -> images [b, 3, H, W]: two standard deviations span [0, 1]."""
        unpacked = unpack_latents(latents.float(), *self.grid(height, width))[:, :3]
        side = self.multiple // 2
        images = unpacked.repeat_interleave(side, -2).repeat_interleave(side, -1)
        return (images / 4 + 0.5).clamp(0, 1)
