# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Attention between tokens that are whole on this rank, for this rank's heads.

Queries and keys travel packed, `[s, b, heads, 2, head_dim]`, so that one pass normalises and
rotates both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_leangrpo.models.common.rotary import rotate

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
    """Packed queries and keys, and values `[s, b, heads, head_dim]`, of a fused projection.

    The projection is interleaved head by head: q, k, v of head 0, then of head 1, and so on.
    """
    qk, v = qkv.unflatten(-1, (-1, 3, head_dim)).split((2, 1), dim=-2)
    return qk, v.squeeze(-2)


def normalise_and_rotate(
    qk: torch.Tensor, q_norm: HeadNorm, k_norm: HeadNorm, table: torch.Tensor | None
) -> torch.Tensor:
    """RMS-normalise packed queries and keys, then rotate them by `table` (None: no rotation)."""
    weight = torch.stack((q_norm.weight, k_norm.weight))
    return _NormaliseAndRotate.apply(qk, weight, table)


class _NormaliseAndRotate(torch.autograd.Function):
    """Keeps its input and one number per head for the backward; plain torch would keep three."""

    @staticmethod
    def forward(
        ctx, qk: torch.Tensor, weight: torch.Tensor, table: torch.Tensor | None
    ) -> torch.Tensor:
        wide = qk.to(torch.promote_types(qk.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse_rms = torch.rsqrt(norm.square() / qk.shape[-1] + RMS_NORM_EPS)
        ctx.save_for_backward(qk, weight, table, inverse_rms)
        out = (wide * inverse_rms).mul_(weight)
        return (out if table is None else rotate(out, table)).to(qk.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        qk, weight, table, inverse_rms = ctx.saved_tensors
        grad = grad.to(inverse_rms.dtype)
        if table is not None:
            grad = rotate(grad, table.conj())
        normalised = qk * inverse_rms
        products = grad * normalised
        weight_grad = products.sum(dim=(0, 1, 2)).to(weight.dtype)
        projection = products.mul_(weight).mean(dim=-1, keepdim=True)
        qk_grad = torch.addcmul(grad * weight, normalised, projection, value=-1).mul_(inverse_rms)
        return qk_grad.to(qk.dtype), weight_grad, None


class CoreAttention(torch.nn.Module):
    """Full attention without a mask, to `[s, b, heads * head_dim]`.

    With `recompute` (megatron's selective recomputation) the graph keeps its inputs alone.
    """

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute

    def forward(self, qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(_attend, qk, v, use_reentrant=False, preserve_rng_state=False)
        return _attend(qk, v)


def _attend(qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k = qk.unbind(dim=-2)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
