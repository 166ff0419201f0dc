# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Attention between all tokens, for this rank's heads.

Queries and keys travel packed, `[s, b, heads, 2, head_dim]`, so that one pass normalises and
rotates both; where they come from different tokens each is a pack of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from megatron_leangrpo import platform
from megatron_leangrpo.models.common.rotary import rotate
from megatron_leangrpo.overlap.query_split import LaterRows, attend_later
from megatron_leangrpo.overlap.ulysses import OverlappedHeadExchange
from megatron_leangrpo.parallel.tokens import TokenRows

RMS_NORM_EPS = 1e-6


class HeadNorm(torch.nn.Module):
    """The weight of one RMS normalisation over the head dimension, the same for every head.

    megatron sums the gradients of parameters whose name contains `q_layernorm` or `k_layernorm`
    over the tensor-parallel ranks, which hold different heads.
    """

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(head_dim, dtype=dtype))


class HiddenNorm(torch.nn.Module):
    """The weight of one RMS normalisation over all heads together, sharded with the heads.

    Its gradient is complete on the rank that holds it, so its owner must not give it a name that
    makes megatron sum it over the tensor-parallel ranks (see `HeadNorm`).
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        shards = platform.group_size(platform.tp_group())
        self.weight = torch.nn.Parameter(torch.empty(hidden_size // shards, dtype=dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)


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
    return _NormaliseAndRotate.apply(qk, weight, table, _ONE_HEAD, None)


def normalise_across_heads(
    packed: torch.Tensor, *norms: HiddenNorm, table: torch.Tensor | None = None
) -> torch.Tensor:
    """RMS-normalise `[s, b, heads, pack, head_dim]` over the heads of all ranks, then rotate it.

    There is one norm for each of the pack. Only sums of squares travel between the ranks.
    """
    heads, head_dim = packed.shape[2], packed.shape[-1]
    weight = torch.stack([norm.weight.view(heads, head_dim) for norm in norms], dim=1)
    group = platform.tp_group()
    group = group if platform.group_size(group) > 1 else None
    return _NormaliseAndRotate.apply(packed, weight, table, _ALL_HEADS, group)


_ONE_HEAD, _ALL_HEADS = (-1,), (-3, -1)


class _NormaliseAndRotate(torch.autograd.Function):
    """Keeps its input and the inverse RMS for the backward; plain torch would keep three tensors.

    The RMS is over `dims` of the tensors of all ranks of `group` together.
    """

    @staticmethod
    def forward(
        ctx,
        qk: torch.Tensor,
        weight: torch.Tensor,
        table: torch.Tensor | None,
        dims: tuple[int, ...],
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        wide = qk.to(torch.promote_types(qk.dtype, torch.float32))
        squares = torch.linalg.vector_norm(wide, dim=dims, keepdim=True).square()
        if group is not None:
            dist.all_reduce(squares, group=group)
        ctx.dims, ctx.group = dims, group
        ctx.count = math.prod(qk.shape[dim] for dim in dims) * platform.group_size(group)
        inverse_rms = torch.rsqrt(squares / ctx.count + RMS_NORM_EPS)
        ctx.save_for_backward(qk, weight, table, inverse_rms)
        out = (wide * inverse_rms).mul_(weight)
        return (out if table is None else rotate(out, table)).to(qk.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        qk, weight, table, inverse_rms = ctx.saved_tensors
        grad = grad.to(inverse_rms.dtype)
        if table is not None:
            grad = rotate(grad, table.conj())
        normalised = qk * inverse_rms
        products = grad * normalised
        weight_grad = products.sum_to_size(weight.shape).to(weight.dtype)
        projection = products.mul_(weight).sum(dim=ctx.dims, keepdim=True)
        if ctx.group is not None:
            # Every rank's outputs depend on every rank's inputs through the common RMS.
            dist.all_reduce(projection, group=ctx.group)
        projection /= ctx.count
        qk_grad = torch.addcmul(grad * weight, normalised, projection, value=-1).mul_(inverse_rms)
        return qk_grad.to(qk.dtype), weight_grad, None, None, None


class CoreAttention(torch.nn.Module):
    """Full attention without a mask, to `[s, b, heads * head_dim]`.

    With `recompute` (megatron's selective recomputation) the graph keeps its inputs alone.
    """

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(_attend, q, k, v, use_reentrant=False, preserve_rng_state=False)
        return _attend(q, k, v)


class Stream(NamedTuple):
    """Tokens with projections of their own among those that attend to one another."""

    qk: torch.Tensor
    """Packed queries and keys."""
    v: torch.Tensor
    rows: TokenRows
    """Which rows its output projection takes."""


class SelfAttention(torch.nn.Module):
    """Attention of all tokens to one another, from and to this rank's tokens and all its heads.

    Over context-parallel ranks tokens are exchanged for heads and back (Ulysses). Where the
    attention is recomputed in the backward and alone in its context, an overlapped output
    projection computes it slice by slice: what it is given is filled by the projection.
    """

    def __init__(self, config: TransformerConfig, recompute: bool) -> None:
        super().__init__()
        self.of_heads = CoreAttention(recompute)
        shards, overlap = config.tensor_model_parallel_size, config.overlap
        self.exchange = OverlappedHeadExchange(
            config.num_attention_heads // shards, platform.cp_group(), overlap
        )
        overlaps = shards > 1 and overlap.mode in ("flash", "auto")
        self.splits_queries = recompute and overlaps and self.exchange.ranks == 1

    def forward(
        self, streams: Sequence[Stream], attended: TokenRows
    ) -> list[tuple[torch.Tensor, LaterRows | None]]:
        """What the output projection of each stream takes.

        `attended` says which rows of the joined streams of all ranks are tokens.
        """
        v = _join([stream.v for stream in streams])
        if self.splits_queries:
            k = _join([stream.qk[..., 1, :] for stream in streams])
            queries = [stream.rows.restore(stream.qk[..., 0, :]) for stream in streams]
            return [attend_later(_attend, q, k, v) for q in queries]

        def attend(*heads: torch.Tensor) -> torch.Tensor:
            return attended.restore(self.of_heads(*map(attended.drop, heads)))

        out = self.exchange.around(attend, _join([stream.qk for stream in streams]), v)
        outs = out.split([stream.rows.tokens for stream in streams])
        return [(stream.rows.restore(x), None) for stream, x in zip(streams, outs)]


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def name_attentions(model: torch.nn.Module) -> None:
    """Tell every self-attention of `model` its name, for errors, and connect the ranks of it.

    Every process of the world must come to it.
    """
    for name, module in model.named_modules():
        if isinstance(module, SelfAttention):
            module.exchange.prepare(name)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
