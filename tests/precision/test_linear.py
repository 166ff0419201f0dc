# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A linear in FP8 multiplies quantised operands, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from megatron_leangrpo.precision.operands import ReferenceOperands
from megatron_leangrpo.precision.quantise import E4M3, E5M2, Blocks, quantise
from megatron_leangrpo.precision.recipe import Fp8Settings
from megatron_leangrpo.precision.scaling import DelayedScales, renew_scales

Tensors = tuple[torch.Tensor, ...]


def drawn(dtype: torch.dtype = torch.float32) -> Tensors:
    """Input `[s, b, k]`, weight, bias and a gradient; sizes divide by no block."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 3, 144), (80, 144), (80,), (7, 3, 80))
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)


def back_and_forth(x: torch.Tensor, dtype: torch.dtype, blocks: Blocks) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return quantise(flat, dtype, blocks).dequantise(x.dtype).view(x.shape)


def run(operands: ReferenceOperands, *tensors: torch.Tensor) -> Tensors:
    """Output and gradients of input, weight and bias."""
    x, weight, bias = (tensor.clone().requires_grad_() for tensor in tensors[:3])
    out = operands.linear(x, weight, bias)
    out.backward(tensors[3])
    return out.detach(), x.grad, weight.grad, bias.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["current", "blockwise", "mxfp8"])
def test_dequantized_is_the_linear_of_what_the_codes_stand_for(recipe: str, dtype: torch.dtype):
    settings = Fp8Settings(recipe)
    x, weight, bias, grad = drawn(dtype)
    actual = run(ReferenceOperands(settings), x, weight, bias, grad)

    rounded_x = back_and_forth(x, E4M3, settings.vectors()).requires_grad_()
    rounded_weight = back_and_forth(weight, E4M3, settings.weights()).requires_grad_()
    bias = bias.requires_grad_()
    out = F.linear(rounded_x, rounded_weight, bias)
    out.backward(grad)
    expected = (out.detach(), rounded_x.grad, rounded_weight.grad, bias.grad)
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e)
    # The rounding is there: it is no linear of the unrounded operands.
    assert not torch.allclose(actual[0].float(), F.linear(x.float(), weight.float()), rtol=1e-3)


@pytest.mark.parametrize("recipe", ["current", "blockwise", "mxfp8"])
def test_quantized_rounds_along_what_each_product_sums_over(recipe: str):
    settings = Fp8Settings(recipe, backward="quantized")
    x, weight, bias, grad = drawn()
    out, dx, dw, db = run(ReferenceOperands(settings), x, weight, bias, grad)

    gradient_dtype = E5M2 if recipe == "current" else E4M3
    dy = back_and_forth(grad, gradient_dtype, settings.vectors())
    w = back_and_forth(weight, E4M3, settings.weights(along_rows=True))
    torch.testing.assert_close(dx, dy @ w)
    along = settings.vectors(along_rows=True)
    dy = back_and_forth(grad, gradient_dtype, along).flatten(0, 1)
    torch.testing.assert_close(dw, dy.t() @ back_and_forth(x, E4M3, along).flatten(0, 1))
    torch.testing.assert_close(db, grad.sum((0, 1)))
    forward = run(ReferenceOperands(Fp8Settings(recipe)), x, weight, bias, grad)[0]
    assert torch.equal(out, forward)


def test_only_the_dequantized_backward_is_linear():
    """Reweight weighs gradients after the backward, replay before it: both must be the same."""
    *tensors, grad = drawn()
    for backward, most in (("dequantized", 1e-6), ("quantized", 1.0)):
        operands = ReferenceOperands(Fp8Settings("mxfp8", backward=backward))
        afterwards = 0.7 * run(operands, *tensors, grad)[2]
        before = run(operands, *tensors, 0.7 * grad)[2]
        error = ((afterwards - before).norm() / before.norm()).item()
        assert error < most
    assert error > 1e-3


def test_a_frozen_weight_keeps_no_input_for_its_gradient():
    x, weight, bias, grad = drawn()
    operands = ReferenceOperands(Fp8Settings("current"))
    out = operands.linear(x.requires_grad_(), weight, bias)
    assert out.grad_fn.saved_tensors[0] is None
    out.backward(grad)
    assert x.grad is not None


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_message_is_one_byte_a_number_and_gives_the_same_bits(recipe: str, dtype: torch.dtype):
    x = drawn(dtype)[0]
    settings = Fp8Settings(recipe)
    scales = DelayedScales(2, settings) if recipe == "delayed" else None
    operands, rows = ReferenceOperands(settings, scales, slot=1), x.flatten(0, 1)
    packed = operands.pack(rows)
    behind = {"blockwise": 8, "mxfp8": 5}.get(recipe, 4)
    assert packed.dtype == torch.uint8 and packed.shape == (21, 144 + behind)
    expected = operands.input(rows).dequantise(dtype)
    assert torch.equal(operands.unpack(packed, 144).dequantise(dtype), expected)
    # Rows may be cut and arrive in any order.
    assert torch.equal(operands.unpack(packed[5:9], 144).dequantise(dtype), expected[5:9])


def test_delayed_scales_stay_until_they_are_renewed():
    settings = Fp8Settings("delayed", amax_history_len=3, margin=1)
    scales = DelayedScales(2, settings)
    operands, (x, weight, *_) = ReferenceOperands(settings, scales, slot=1), drawn()
    rows = x.flatten(0, 1)
    with scales.recording():
        operands.input(rows), operands.weight(weight), operands.input(rows / 2)
    assert torch.equal(scales.scale, torch.ones(2))
    renew_scales(scales)
    expected = 224 / torch.stack((x.abs().max(), weight.abs().max()))
    assert torch.equal(scales.scale, expected)
    # Nothing counts outside, and an empty entry changes no scale while the history has another.
    operands.input(100 * rows)
    renew_scales(scales)
    assert torch.equal(scales.scale, expected)


@pytest.mark.parametrize(("algo", "expected"), [("max", [64.0, 64.0, 64.0]), ("most_recent", None)])
def test_the_history_forgets_after_its_length(algo: str, expected: list[float] | None):
    settings = Fp8Settings("delayed", amax_history_len=3, amax_compute_algo=algo)
    scales = DelayedScales(1, settings)
    seen = []
    for largest in (7.0, 1.75, 3.5, 0.875):
        with scales.recording():
            scales.scale_of(0, torch.tensor([[largest]]))
        renew_scales(scales)
        seen.append(scales.scale.item())
    assert seen == ([*expected, 128.0] if expected else [64.0, 256.0, 128.0, 512.0])
