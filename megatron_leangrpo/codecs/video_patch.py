# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The parameter-free codec of videos, for models with random weights."""

import torch
from torch import Tensor

from megatron_leangrpo.codecs.patch import PatchCodec


class VideoPatchCodec(PatchCodec):
    """Every latent frame is shown as `PatchCodec` shows a picture.

    Args:
        channels: per token, four times the latent channels.
        patch: pixels per token side.
        temporal_stride: frames that a latent frame after the first stands for.
    """

    makes_videos = True

    def __init__(self, channels: int, patch: int, temporal_stride: int) -> None:
        super().__init__(channels, patch)
        self.temporal_stride = temporal_stride

    @torch.no_grad()
    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Packed latents [b, f * s, c], frame by frame -> video [b, frames, 3, H, W]."""
        rows, columns = self.grid(height, width)
        frames = latents.unflatten(1, (-1, rows * columns))
        pictures = super().decode(frames.flatten(0, 1), height, width)
        video = pictures.unflatten(0, frames.shape[:2])
        later = video[:, 1:].repeat_interleave(self.temporal_stride, dim=1)
        return torch.cat([video[:, :1], later], dim=1)
