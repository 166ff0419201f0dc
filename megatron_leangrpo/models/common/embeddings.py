# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Embeddings of scalars and vectors that condition the whole model."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

MAX_PERIOD = 10000.0


def sinusoid(values: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """`[...]` to `[..., width]`, cosines first; float32 or wider inside, rounded to `dtype`."""
    wide = torch.promote_types(values.dtype, torch.float32)
    half = width // 2
    exponents = torch.arange(half, dtype=wide, device=values.device) * (
        -math.log(MAX_PERIOD) / half
    )
    angles = values.to(wide)[..., None] * exponents.exp()
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


class MLPEmbedder(torch.nn.Module):
    """Two linears with an activation between, replicated on every rank."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        inner_size: int | None = None,
    ) -> None:
        super().__init__()
        inner_size = inner_size or hidden_size
        self.activation = activation
        self.in_layer = torch.nn.Linear(input_size, inner_size, dtype=dtype)
        self.out_layer = torch.nn.Linear(inner_size, hidden_size, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_layer(self.activation(self.in_layer(x)))
