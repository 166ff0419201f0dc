# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Embeddings of scalars and vectors that condition the whole model."""

import math

import torch
import torch.nn.functional as F

MAX_PERIOD = 10000.0


def sinusoid(values: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """`[b]` to `[b, width]`, cosines first, computed in float32 or wider and rounded to `dtype`."""
    wide = torch.promote_types(values.dtype, torch.float32)
    half = width // 2
    exponents = torch.arange(half, dtype=wide, device=values.device) * (
        -math.log(MAX_PERIOD) / half
    )
    angles = values.to(wide)[:, None] * exponents.exp()
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


class MLPEmbedder(torch.nn.Module):
    """Two linears with SiLU between, replicated on every rank."""

    def __init__(self, input_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_layer = torch.nn.Linear(input_size, hidden_size, dtype=dtype)
        self.out_layer = torch.nn.Linear(hidden_size, hidden_size, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_layer(F.silu(self.in_layer(x)))
