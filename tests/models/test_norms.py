# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The norms with backwards of their own against plain torch."""

from __future__ import annotations

import pytest
import torch

from megatron_leangrpo.models.common.attention import HiddenNorm, normalise_across_heads
from megatron_leangrpo.models.common.norms import scaled_norm


@pytest.mark.parametrize("vectors", [(16,), (2, 16), (5, 2, 16)], ids=["one", "sample", "token"])
def test_scaled_norm_has_the_gradients_of_its_formula(vectors):
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 2, 16), vectors, vectors)
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]
    assert torch.autograd.gradcheck(scaled_norm, inputs)
    x, factor, shift = inputs
    expected = torch.nn.functional.layer_norm(x, (16,), eps=1e-6) * factor + shift
    assert torch.allclose(scaled_norm(x, factor, shift), expected, rtol=1e-12, atol=1e-12)


def test_scaled_norm_keeps_its_input_and_nothing_as_large():
    x = torch.randn(64, 2, 32).bfloat16().requires_grad_()
    factor, shift = (torch.randn(2, 32).requires_grad_() for _ in range(2))
    large = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: large.append(t.dtype) if t.numel() >= x.numel() else None, lambda t: t
    ):
        scaled_norm(x, factor, shift)
    assert large == [torch.bfloat16]


def test_norm_over_all_heads_has_the_gradients_of_torchs(single_process):
    norms = [HiddenNorm(24, torch.float64) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for norm in norms:
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)
    packed = torch.randn(5, 2, 4, 2, 6, generator=generator, dtype=torch.float64).requires_grad_()
    grad = torch.randn(packed.shape, generator=generator, dtype=torch.float64)

    found = normalise_across_heads(packed, *norms)
    gradients = torch.autograd.grad(found, [packed, *(n.weight for n in norms)], grad)
    expected = torch.stack(
        [
            torch.nn.functional.rms_norm(part.flatten(2), (24,), norm.weight, 1e-6).unflatten(
                -1, (4, 6)
            )
            for part, norm in zip(packed.unbind(dim=-2), norms)
        ],
        dim=-2,
    )
    wanted = torch.autograd.grad(expected, [packed, *(n.weight for n in norms)], grad)
    for one, other in zip((found, *gradients), (expected, *wanted)):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
