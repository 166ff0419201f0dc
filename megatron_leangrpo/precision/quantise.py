# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Quantise to FP8 and back with transformer-engine's scales and rounding, in plain torch.

Paths in comments are of NVIDIA/TransformerEngine. An element becomes `float(x) * scale`, a float32
product, rounded to the nearest code, ties to even, saturating (`cvt.rn.satfinite`): infinities
become the largest finite number, NaN stays NaN. Back it is `float(code) * (1 / scale)`, rounded
to the dtype asked for (common/cast/*/dequantize_*.cuh).
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_FLOAT32_MAX = torch.finfo(torch.float32).max


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 to FP8; torch's own cast rounds alike and overflows to NaN or infinity."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def amax(x: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """The largest magnitude in float32; NaN does not count (`fmaxf` and `__hmax` drop it)."""
    magnitude = x.float().abs()
    magnitude = torch.where(magnitude.isnan(), 0.0, magnitude)
    return magnitude.amax() if dim is None else magnitude.amax(dim)


def scale_of(
    largest: torch.Tensor, dtype: torch.dtype, power_of_two: bool, infinite: float = _FLOAT32_MAX
) -> torch.Tensor:
    """The scale that takes `largest` to the largest FP8 number.

    `compute_scale_from_amax` (common/recipe/recipe_common.cuh): 1 for zero, infinity and NaN;
    `infinite` where the quotient overflows; rounded down to a power of two on request.
    """
    # A quotient of tensors: torch multiplies a number with the reciprocal, which rounds twice.
    scale = torch.full_like(largest, torch.finfo(dtype).max) / largest
    scale = torch.where(scale.isinf(), infinite, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    usable = largest.isfinite() & (largest != 0)
    return torch.where(usable, scale, 1.0)


def delayed_scale_of(
    largest: torch.Tensor, previous: torch.Tensor, dtype: torch.dtype, margin: int
) -> torch.Tensor:
    """The next scale of delayed scaling; `previous` where there is no usable maximum.

    `amax_and_scale_update` (common/recipe/delayed_scaling.cu).
    """
    scale = torch.full_like(largest, torch.finfo(dtype).max * 2.0**-margin) / largest
    scale = torch.where(largest.isfinite() & (largest > 0), scale, previous)
    return torch.where(scale.isinf(), _FLOAT32_MAX, scale)


def e8m0_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """MXFP8's biased exponent, as uint8: `largest / max` rounded up to a power of two.

    `float_to_e8m0` (common/util/ptx.cuh); the quotient is a product with the float32 reciprocal.
    """
    value = largest * torch.tensor(1 / torch.finfo(dtype).max)
    bits = value.view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    rounds_up = (mantissa > 0) & (exponent != 0xFE)
    rounds_up &= ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = torch.where(rounds_up, exponent + 1, exponent)
    exponent = torch.where(value.isinf(), 0xFE, exponent).masked_fill(value.isnan(), 0xFF)
    return exponent.to(torch.uint8)


def _power_of_two(biased: torch.Tensor) -> torch.Tensor:
    return (biased.to(torch.int32) << 23).view(torch.float32)


@dataclass(frozen=True)
class Blocks:
    """The blocks of a matrix that have a scale each, and how it is chosen."""

    rows: int | None
    """Rows and columns of a block; None for all of them."""
    columns: int | None
    power_of_two: bool = False
    e8m0: bool = False
    """Scales are exponents of a byte (MXFP8)."""

    def by_row(self) -> "Blocks":
        """The same along a row; each row has scales of its own."""
        return replace(self, rows=1)

    def shape(self, x: torch.Tensor) -> tuple[int, int]:
        """Rows and columns of a block of `x` `[rows, columns]`."""
        return self.rows or max(1, x.shape[0]), self.columns or x.shape[1]


TENSOR = Blocks(None, None)


@dataclass(frozen=True)
class Quantised:
    """FP8 codes `[rows, columns]` and what each block is multiplied with to get it back."""

    codes: torch.Tensor
    scale_inv: torch.Tensor
    """`[row blocks, column blocks]`: float32, or biased exponents in uint8 (MXFP8)."""
    blocks: Blocks

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers the codes stand for, `[rows, columns]`."""
        scale = self.scale_inv
        if self.blocks.e8m0:
            scale = _power_of_two(scale)
        tiled = _tiles(self.codes.float(), self.blocks.shape(self.codes))
        return _flat(tiled * scale[:, None, :, None], self.codes.shape).to(dtype)


def quantise(
    x: torch.Tensor, dtype: torch.dtype, blocks: Blocks, scale: torch.Tensor | None = None
) -> Quantised:
    """Quantise `[rows, columns]` by blocks; incomplete ones count as filled up with zeros.

    `scale` replaces the scale of the one block of `TENSOR` (delayed scaling).
    """
    tiled = _tiles(x.float(), blocks.shape(x))
    if blocks.e8m0:
        exponent = e8m0_of(amax(tiled, (1, 3)), dtype)
        # `exp2f_rcp`: a block without a scale keeps 1; infinity's is 0, and makes itself NaN.
        scale = torch.where(exponent == 0, 1.0, _power_of_two(254 - exponent.to(torch.int32)))
        scale_inv = exponent
    else:
        if scale is None:
            # Block scaling counts an overflow as the largest number of the input's dtype
            # (`compute_scale_from_types`), scaling by tensor as that of float32.
            by_tensor = blocks.rows is None and blocks.columns is None
            infinite = _FLOAT32_MAX if by_tensor else torch.finfo(x.dtype).max
            scale = scale_of(amax(tiled, (1, 3)), dtype, blocks.power_of_two, infinite)
        scale = scale.reshape(tiled.shape[0], tiled.shape[2])
        scale_inv = scale.reciprocal()
    codes = cast(tiled * scale[:, None, :, None], dtype)
    return Quantised(_flat(codes, x.shape), scale_inv, blocks)


def _tiles(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """`[rows, columns]` to `[row blocks, rows, column blocks, columns]`, padded with zeros."""
    rows, columns = (-size % of for size, of in zip(x.shape, block))
    if rows or columns:
        x = F.pad(x, (0, columns, 0, rows))
    return x.reshape(-1, block[0], x.shape[1] // block[1], block[1])


def _flat(tiled: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    whole = tiled.reshape(tiled.shape[0] * tiled.shape[1], -1)
    return whole[: shape[0], : shape[1]].contiguous()
