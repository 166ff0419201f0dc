# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A linear with quantised operands, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from megatron_leangrpo.precision.quantise import Blocks, Quantised, quantise

if TYPE_CHECKING:
    from megatron_leangrpo.precision.operands import ReferenceOperands


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    operands: ReferenceOperands,
) -> torch.Tensor:
    """`x @ weight.t() + bias` of quantised `x` and `weight`; the bias keeps its dtype.

    Backward of `dequantized`: gradients are multiplied unrounded with the operands of the forward,
    so it is linear in them. Of `quantized`: the operands are quantised along what each product sums
    over, gradients too, as transformer-engine does by default; a bias gets the unrounded gradient.
    """
    return _Fp8Linear.apply(x, weight, bias, operands)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, operands: ReferenceOperands):
        rows = x.reshape(-1, x.shape[-1])
        quantised = operands.input(rows)
        multiply = operands.product or F.linear
        out = multiply(operands.rows(quantised, x.dtype), operands.factor(weight), bias)
        ctx.operands, ctx.shape = operands, x.shape
        settings, saved = operands.settings, quantised
        if settings.quantises_gradients:
            saved = quantise(rows, settings.forward_dtype, settings.vectors(along_rows=True))
        ctx.blocks = saved.blocks
        # A byte a number instead of two or four; the weight is quantised again.
        kept = (saved.codes, saved.scale_inv) if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(*kept, weight)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        codes, scale_inv, weight = ctx.saved_tensors
        operands: ReferenceOperands = ctx.operands
        settings = operands.settings
        grad = grad.reshape(-1, grad.shape[-1])
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = dw = None

        def rounded(tensor: torch.Tensor, dtype: torch.dtype, blocks: Blocks) -> torch.Tensor:
            return quantise(tensor, dtype, blocks).dequantise(tensor.dtype)

        if needs_x and settings.quantises_gradients:
            dy = rounded(grad, settings.gradient_dtype, settings.vectors())
            dx = dy @ rounded(weight, settings.forward_dtype, settings.weights(along_rows=True))
        elif needs_x:
            dx = grad @ operands.weight(weight)
        if needs_weight:
            dy = grad
            if settings.quantises_gradients:
                dy = rounded(grad, settings.gradient_dtype, settings.vectors(along_rows=True))
            dw = dy.t() @ Quantised(codes, scale_inv, ctx.blocks).dequantise(grad.dtype)
        db = grad.sum(0) if needs_bias else None
        return dx.view(ctx.shape) if needs_x else None, dw, db, None
