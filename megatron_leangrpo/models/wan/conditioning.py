# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What Wan is conditioned on, and the embedding of a picture."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from megatron_leangrpo.models.common.embeddings import MLPEmbedder
from megatron_leangrpo.models.common.norms import LayerNorm

IMAGE_NORM_EPS = 1e-5
"""torch's default, which the authors left in the image branch; elsewhere it is 1e-6."""


class VideoConditioning(Protocol):
    """The fields of a conditioning that the model reads."""

    prompt_embeds: torch.Tensor
    """`[b, 512, joint_attention_dim]`: no mask, zeros after the prompt's end take part."""
    image_embeds: torch.Tensor | None
    """`[b, 257, image_dim]` of a picture, for models with an image branch."""
    image_latents: torch.Tensor | None
    """`[b, s, 4 * (in_channels - out_channels)]` beside the video's own, mask included: packed like
    them, for image-to-video models."""


class ImageEmbedding(torch.nn.Module):
    """CLIP's tokens of a picture between two norms."""

    def __init__(self, image_dim: int, hidden: int, dtype: torch.dtype, wide: torch.dtype) -> None:
        super().__init__()
        self.norm_in = LayerNorm(image_dim, wide, IMAGE_NORM_EPS)
        self.mlp = MLPEmbedder(image_dim, hidden, dtype, F.gelu, inner_size=image_dim)
        self.norm_out = LayerNorm(hidden, wide, IMAGE_NORM_EPS)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.norm_out(self.mlp(self.norm_in(image)))
