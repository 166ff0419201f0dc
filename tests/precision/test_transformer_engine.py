# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""transformer-engine's kernels against the reference; without a GPU only what is said instead."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

from megatron_leangrpo.precision import transformer_engine
from megatron_leangrpo.precision.linear import fp8_linear
from megatron_leangrpo.precision.operands import ReferenceOperands
from megatron_leangrpo.precision.recipe import RECIPES, Fp8Settings
from megatron_leangrpo.precision.scaling import DelayedScales

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
@pytest.mark.parametrize(
    ("recipe", "backward", "linear"),
    [
        *((r, b, "te.Linear") for r in RECIPES[1:] for b in ("dequantized", "quantized")),
        *((r, "dequantized", "quantisers and GEMM") for r in RECIPES),
    ],
)
def test_kernels_compute_what_the_reference_does(recipe: str, backward: str, linear: str):
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
    scales = DelayedScales(2, settings).cuda() if settings.is_delayed else None
    kernels = transformer_engine.TransformerEngineOperands(settings, scales, slot=1)
    reference = ReferenceOperands(Fp8Settings(recipe, backward=backward), scales, slot=1)
    for operands in (kernels, reference):
        inputs = x.clone().requires_grad_(), torch.nn.Parameter(weight.clone())
        if linear == "te.Linear":
            out = operands.linear(*inputs, None)
        else:
            # What the linears of several ranks call.
            out = fp8_linear(*inputs, None, operands)
        out.backward(grad)
        results.append((out, inputs[0].grad, inputs[1].grad))
    for actual, expected in zip(*results):
        # The reference rounds operands to bfloat16 before it multiplies: 2**-9 a number.
        error = (actual.float() - expected.float()).norm() / expected.float().norm()
        assert error < 1e-2
