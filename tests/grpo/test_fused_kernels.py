# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Weight gradients that a container's kernel adds to megatron's buffers, on every schedule.

The kernel is a stand-in with the name and signature of apex's, which megatron-core calls in its
tensor_parallel/layers.py: `wgrad_gemm_accum_fp32(input, grad_output, main_grad)`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.common import norms
from megatron_leangrpo.overlap import weight_grad
from tests.grpo.tiny import WAN, first_gradient, start, tiny_config, worst, write_prompts
from tests.precision.stand_in import transformer_engine

SCHEDULES = ("replay", "retain", "reweight")
EARLY = {"optimizer": {"overlap_grad_reduce": True}}
FP8 = {"recipe": "current", "backend": "reference"}
ALL_WEIGHTS, ADAPTERS = {}, {"lora": {"rank": 2}}


@contextmanager
def apex(calls: list[torch.Size]) -> Iterator[None]:
    """A machine that has apex's kernel, which notes the shapes it is called with."""

    def wgrad_gemm_accum_fp32(rows, grad, main_grad) -> None:
        assert rows.dim() == grad.dim() == 2 and rows.dtype == grad.dtype
        assert all(x.is_contiguous() for x in (rows, grad, main_grad))
        assert main_grad.dtype == torch.float32
        calls.append(main_grad.shape)
        main_grad.add_(grad.float().t() @ rows.float())

    module = ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32
    with (
        _modules({module.__name__: module}),
        mock.patch.object(weight_grad, "fuses_here", return_value=True),
    ):
        yield


@contextmanager
def _modules(there: dict[str, ModuleType]) -> Iterator[None]:
    """Kernels are looked for once."""
    caches = (weight_grad._kernel, norms._apex_layer_norm)
    with mock.patch.dict(sys.modules, there):
        for cache in caches:
            cache.cache_clear()
        try:
            yield
        finally:
            for cache in caches:
                cache.cache_clear()


def _errors(prompts: str, tp: int, overlap: str, sections: dict[str, Any]) -> dict[str, Any]:
    """The worst tensor's error against torch's own products, on each schedule; calls."""
    platform.initialize_distributed(tp)
    config = tiny_config(
        prompts,
        grpo={"micro_batch_size": 1, "group_size": 2, "prompts_per_iteration": 1},
        parallel={"tensor_model_parallel_size": tp},
        overlap={"mode": overlap},
        **sections,
    )
    experiment = start(config)
    expected = {schedule: first_gradient(experiment, schedule)[0] for schedule in SCHEDULES}
    calls: list[torch.Size] = []
    with apex(calls):
        experiment = start(config)
        errors = {}
        for schedule in SCHEDULES:
            experiment.model.zero_grad_buffer()
            gradient = first_gradient(experiment, schedule)[0]
            errors[schedule] = worst(gradient, expected[schedule])[0]
    return {"errors": errors, "calls": len(calls)}


# A gradient in bfloat16 is rounded to 2**-9 before torch adds it; the kernel's never is.
CASES = [
    pytest.param(1, "off", ALL_WEIGHTS, 1e-5, id="alone"),
    pytest.param(1, "off", {"model": {"dtype": "bfloat16"}}, 2e-2, id="bfloat16"),
    pytest.param(1, "off", WAN, 1e-5, id="wan"),
    pytest.param(1, "off", {"model": {"recompute_granularity": "full"}}, 1e-5, id="recomputed"),
    pytest.param(2, "off", ALL_WEIGHTS, 1e-5, id="tp 2"),
    pytest.param(2, "flash", ALL_WEIGHTS, 1e-5, id="tp 2 flash"),
    pytest.param(1, "off", EARLY, 1e-5, id="reduced early"),
    pytest.param(1, "off", {"fp8": FP8}, 1e-5, id="fp8"),
    pytest.param(2, "flash", {"fp8": FP8}, 1e-5, id="fp8, tp 2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("tp", "overlap", "sections", "most"), CASES)
def test_the_kernel_gives_the_gradient_of_torchs_products(
    run_ranks, tp: int, overlap: str, sections: dict, most: float, tmp_path: Path
):
    for found in run_ranks(tp, _errors, write_prompts(tmp_path), tp, overlap, sections):
        assert found["calls"] > 0  # In FP8 too: the ends of the model are not.
        assert max(found["errors"].values()) < most, found["errors"]


def test_frozen_weights_have_no_gradient_to_add(tmp_path: Path):
    found = _errors(write_prompts(tmp_path), 1, "off", ADAPTERS)
    assert max(found["errors"].values()) < 1e-5


def test_transformer_engines_product_is_used_where_apex_is_not():
    rows, grad = torch.randn(6, 4), torch.randn(6, 3)
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    weight.main_grad = torch.ones(3, 4)
    calls = []

    def general_gemm(A, B, *, out_dtype, layout, grad, accumulate, out):
        # Column-major: NT is the second, transposed, with the first.
        assert layout == "NT" and grad and accumulate and out_dtype == torch.float32
        calls.append(out.shape)
        out.add_(B.t() @ A)

    with transformer_engine(), _modules({}):
        sys.modules["transformer_engine.pytorch.cpp_extensions"].general_gemm = general_gemm
        given = weight_grad.WeightGradient(fused=True).of(weight, grad, rows)
    assert given is None and calls == [(3, 4)]
    torch.testing.assert_close(weight.main_grad, 1 + grad.t() @ rows)


def test_without_a_gpu_or_a_kernel_nothing_is_fused(monkeypatch):
    assert not weight_grad.fuses_here()
    monkeypatch.setattr(platform, "is_host", lambda: False)
    assert not weight_grad.fuses_here()
    with _modules({"fused_weight_gradient_mlp_cuda": mock.MagicMock()}):
        assert weight_grad.fuses_here()


def test_layer_norms_are_apexs_where_it_is(monkeypatch):
    x = torch.randn(3, 2, 16)
    expected = norms.plain_norm(x)
    calls = []

    def fused_layer_norm(x, normalized_shape, eps=1e-6, memory_efficient=False):
        calls.append(tuple(normalized_shape))
        centred = x - x.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()

    names = ("apex", "apex.normalization", "apex.normalization.fused_layer_norm")
    there = {name: ModuleType(name) for name in names}
    there[names[-1]].fused_layer_norm = fused_layer_norm
    monkeypatch.setattr(platform, "is_host", lambda: False)
    with _modules(there):
        torch.testing.assert_close(norms.plain_norm(x), expected)
        norms.plain_norm(x.double())
    assert calls == [(16,)]
