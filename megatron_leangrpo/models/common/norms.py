# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Layer normalisation, plain or in a dtype that may be wider than that of the tokens."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megatron_leangrpo import platform

LAYER_NORM_EPS = 1e-6


def plain_norm(x: torch.Tensor) -> torch.Tensor:
    """Layer normalisation over the last dimension, without weights, in the dtype of `x`."""
    kernel = _apex_layer_norm()
    if kernel is not None and x.dtype != torch.float64:
        return kernel(x, x.shape[-1:], LAYER_NORM_EPS)
    return F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS)


@functools.cache
def _apex_layer_norm() -> Callable[..., torch.Tensor] | None:
    """`fused_layer_norm(x, normalized_shape, eps)` where apex and a GPU are here."""
    if platform.is_host():
        return None
    try:
        from apex.normalization.fused_layer_norm import fused_layer_norm
    except ImportError:
        return None
    return fused_layer_norm


def scaled_norm(
    x: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor, eps: float = LAYER_NORM_EPS
) -> torch.Tensor:
    """Layer normalisation of `x`, times `factor`, plus `shift`: vectors `[..., h]` that broadcast.

    It is computed in the dtype of `factor` and `shift`, and rounded to that of `x` at the end.
    """
    return _ScaledNorm.apply(x, factor, shift, eps)


class _ScaledNorm(torch.autograd.Function):
    """Keeps `x` as it came for the backward; plain torch would keep two wide copies of it."""

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor, eps: float
    ) -> torch.Tensor:
        wide = x.to(factor.dtype)
        normalised, mean, inverse_std = torch.native_layer_norm(wide, x.shape[-1:], None, None, eps)
        ctx.save_for_backward(x, factor, mean, inverse_std)
        ctx.shift_shape = shift.shape
        return torch.addcmul(shift, normalised, factor).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, factor, mean, inverse_std = ctx.saved_tensors
        wide, grad = x.to(factor.dtype), grad.to(factor.dtype)
        shift_grad = grad.sum_to_size(ctx.shift_shape)
        factor_grad = ((wide - mean) * inverse_std).mul_(grad).sum_to_size(factor.shape)
        x_grad, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad * factor, wide, x.shape[-1:], mean, inverse_std, None, None, [True, False, False]
        )
        return x_grad.to(x.dtype), factor_grad, shift_grad, None


class LayerNorm(torch.nn.Module):
    """Layer normalisation with weights of its own, in whose dtype it is computed."""

    def __init__(self, size: int, dtype: torch.dtype, eps: float = LAYER_NORM_EPS) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_norm(x, self.weight, self.bias, self.eps)
