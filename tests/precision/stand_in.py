# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A stand-in for transformer-engine: its names, signatures and layouts, computed in torch.

Signatures and layouts are those of the files that precision/transformer_engine.py names. What it
does not take, such as rows that kernels would refuse, fails.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_leangrpo.precision.quantise import (
    E4M3,
    TENSOR,
    Blocks,
    Quantised,
    amax,
    quantise,
    scale_of,
)

DType = SimpleNamespace(kFloat8E4M3="E4M3")


class Float8Tensor:
    """With one scale."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self._data = torch.empty(shape, dtype=torch.uint8)
        self._scale_inv = torch.empty(1)

    def fill(self, quantised: Quantised) -> None:
        self._data.copy_(quantised.codes.view(torch.uint8))
        self._scale_inv.copy_(quantised.scale_inv.reshape(1))

    def dequantise(self) -> torch.Tensor:
        return (self._data.view(E4M3).float() * self._scale_inv).to(self.dtype)


class BlockTensor:
    """With a scale for each block; `compact` turns scales into `[row blocks, column blocks]`."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, blocks: Blocks) -> None:
        self.shape, self.dtype, self.blocks = shape, dtype, blocks
        self._rowwise_data = torch.empty(shape, dtype=torch.uint8)
        rows, columns = -(-shape[0] // blocks.rows), -(-shape[1] // blocks.columns)
        self.count = rows, columns
        if blocks.e8m0:
            padded, scales = (-(-rows // 128) * 128, -(-columns // 4) * 4), torch.uint8
        elif blocks.rows == 1:
            padded, scales = (columns, -(-rows // 4) * 4), torch.float32
        else:
            padded, scales = (rows, -(-columns // 4) * 4), torch.float32
        # Whoever reads padding reads nonsense.
        self._rowwise_scale_inv = torch.full(padded, 77, dtype=scales)

    def compact(self) -> torch.Tensor:
        scales = self._rowwise_scale_inv
        scales = scales.t() if self.blocks.rows == 1 and not self.blocks.e8m0 else scales
        return scales[: self.count[0], : self.count[1]]

    def fill(self, quantised: Quantised) -> None:
        self._rowwise_data.copy_(quantised.codes.view(torch.uint8))
        self.compact().copy_(quantised.scale_inv)

    def dequantise(self) -> torch.Tensor:
        codes = self._rowwise_data.view(E4M3)
        return Quantised(codes, self.compact().contiguous(), self.blocks).dequantise(self.dtype)


class _Quantizer:
    multiple = 16

    def __init__(self, blocks: Blocks, rowwise: bool, columnwise: bool) -> None:
        assert rowwise and not columnwise
        self.blocks = blocks

    def make_empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: Any) -> Any:
        assert all(size % self.multiple == 0 for size in shape), shape
        by_tensor = self.blocks.columns is None
        return Float8Tensor(shape, dtype) if by_tensor else BlockTensor(shape, dtype, self.blocks)

    def __call__(self, x: torch.Tensor) -> Any:
        tensor = self.make_empty(x.shape, dtype=x.dtype, device=x.device)
        tensor.fill(quantise(x, E4M3, self.blocks, self.scale_for(x)))
        return tensor

    def scale_for(self, x: torch.Tensor) -> torch.Tensor | None:
        return None


class Float8Quantizer(_Quantizer):
    def __init__(self, scale, amax, fp8_dtype, *, rowwise=True, columnwise=True) -> None:
        super().__init__(TENSOR, rowwise, columnwise)
        assert scale.shape == amax.shape == (1,) and fp8_dtype == DType.kFloat8E4M3
        self.scale = scale

    def scale_for(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale


class Float8CurrentScalingQuantizer(_Quantizer):
    def __init__(
        self,
        fp8_dtype,
        device,
        *,
        rowwise=True,
        columnwise=True,
        with_amax_reduction=False,
        amax_reduction_group=None,
    ) -> None:
        super().__init__(TENSOR, rowwise, columnwise)
        self.group = amax_reduction_group if with_amax_reduction else None

    def scale_for(self, x: torch.Tensor) -> torch.Tensor:
        largest = amax(x)
        if self.group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return scale_of(largest, E4M3, power_of_two=False)


class MXFP8Quantizer(_Quantizer):
    multiple = 32

    def __init__(self, fp8_dtype, *, rowwise=True, columnwise=True) -> None:
        super().__init__(Blocks(1, 32, e8m0=True), rowwise, columnwise)


class Float8BlockQuantizer(_Quantizer):
    def __init__(
        self, fp8_dtype, *, rowwise, columnwise, force_pow_2_scales=True, block_scaling_dim=2
    ) -> None:
        rows = {1: 1, 2: 128}[block_scaling_dim]
        super().__init__(Blocks(rows, 128, power_of_two=force_pow_2_scales), rowwise, columnwise)


def general_gemm(
    A, B, out_dtype=None, *, accumulate=False, layout="TN", out=None, bias=None
) -> tuple[torch.Tensor, None, None, None]:
    """Column-major, so that it is `B @ A.t()` here."""
    assert layout == "TN" and out_dtype == A.dtype == B.dtype
    result = F.linear(B.dequantise(), A.dequantise(), bias)
    if out is not None:
        assert out.is_contiguous() and out.dtype == out_dtype
        result = out.add_(result) if accumulate else out.copy_(result)
    return result, None, None, None


@contextlib.contextmanager
def transformer_engine() -> Iterator[None]:
    """Have `import transformer_engine` find the stand-in."""
    pytorch, extensions = ModuleType("pytorch"), ModuleType("cpp_extensions")
    quantizers = (
        Float8Quantizer,
        Float8CurrentScalingQuantizer,
        MXFP8Quantizer,
        Float8BlockQuantizer,
    )
    for quantizer in quantizers:
        setattr(pytorch, quantizer.__name__, quantizer)
    pytorch.DType, pytorch.cpp_extensions = DType, extensions
    extensions.general_gemm = general_gemm
    package = ModuleType("transformer_engine")
    package.pytorch = pytorch
    name = "transformer_engine"
    modules = {
        name: package,
        f"{name}.pytorch": pytorch,
        f"{name}.pytorch.cpp_extensions": extensions,
    }
    with mock.patch.dict(sys.modules, modules):
        yield
