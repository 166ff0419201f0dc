# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Attention between tokens that are whole on this rank, for this rank's heads."""

import torch
import torch.nn.functional as F

RMS_NORM_EPS = 1e-6


class HeadNorm(torch.nn.Module):
    """The weight of one RMS normalisation over the head dimension, the same for every head.

    megatron sums the gradients of parameters whose name contains `q_layernorm` or `k_layernorm`
    over the tensor-parallel ranks, which hold different heads.
    """

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(head_dim, dtype=dtype))


def split_qkv(qkv: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys `[s, b, heads, 2, head_dim]` and values `[s, b, heads, head_dim]`.

    The fused projection is interleaved head by head (q, k, v of head 0, then of head 1, ...).
    """
    qkv = qkv.unflatten(-1, (-1, 3, head_dim))
    return qkv[..., :2, :], qkv[..., 2, :]


def normalise_qk(qk: torch.Tensor, q_norm: HeadNorm, k_norm: HeadNorm) -> torch.Tensor:
    """RMS-normalise queries and keys `[s, b, heads, 2, head_dim]` in one pass."""
    weight = torch.stack((q_norm.weight, k_norm.weight))
    wide = qk.to(torch.promote_types(qk.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + RMS_NORM_EPS)
    return (wide * scale).to(qk.dtype) * weight


def attend(qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Full attention of packed q, k and v, as in `split_qkv`, to `[s, b, heads * head_dim]`."""
    q, k = qk.unbind(dim=-2)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
