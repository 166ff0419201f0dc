# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""transformer-engine's kernels against the reference; without a GPU only what is said instead."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

from megatron_leangrpo.precision import transformer_engine
from megatron_leangrpo.precision.operands import ReferenceOperands
from megatron_leangrpo.precision.recipe import Fp8Settings

_MISSING = (
    "needs transformer-engine"
    if importlib.util.find_spec("transformer_engine") is None
    else None
    if torch.cuda.is_available()
    else "needs a CUDA device"
)


@pytest.mark.skipif(_MISSING is None, reason="transformer-engine and a GPU are here")
def test_what_is_missing_is_said_in_one_line(monkeypatch):
    settings = Fp8Settings("mxfp8", backend="transformer_engine")
    with pytest.raises(ValueError, match=re.escape("valid here: fp8.backend = reference (slow)")):
        transformer_engine.check_available(settings)
    if torch.cuda.is_available():
        return
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="there is no GPU"):
        transformer_engine.check_available(settings)


@pytest.mark.gpu
@pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))
@pytest.mark.parametrize("recipe", ["current", "blockwise", "mxfp8"])
@pytest.mark.parametrize("backward", ["dequantized", "quantized"])
def test_kernels_compute_what_the_reference_does(recipe: str, backward: str):
    settings = Fp8Settings(recipe, "transformer_engine", backward)
    try:
        transformer_engine.check_available(settings)
    except ValueError as error:
        pytest.skip(str(error))
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16)
        for shape in ((37, 2, 256), (384, 256), (37, 2, 384))
    )
    results = []
    kernels = transformer_engine.TransformerEngineOperands(settings)
    for operands in (kernels, ReferenceOperands(Fp8Settings(recipe, backward=backward))):
        inputs = x.clone().requires_grad_(), torch.nn.Parameter(weight.clone())
        out = operands.linear(*inputs, None)
        out.backward(grad)
        results.append((out, inputs[0].grad, inputs[1].grad))
    for actual, expected in zip(*results):
        # The reference rounds operands to bfloat16 before it multiplies: 2**-9 a number.
        error = (actual.float() - expected.float()).norm() / expected.float().norm()
        assert error < 1e-2
