# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The tiny FluxTransformer2DModel and its velocity."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GUIDANCE = 3.5
MAX_SEQUENCE_LENGTH = 8
BATCH = 64


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

    def velocity(self, model: Any, latents: Tensor, time: Tensor, prompts: Tensor) -> Tensor:
        """The velocity for prompts by index."""
        return velocity(model, latents, time, self.prompt_embeds[prompts], self.pooled[prompts])
