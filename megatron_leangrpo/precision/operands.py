# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a linear multiplies in FP8: its input and weight, quantised by a recipe.

The reference backend multiplies dequantised operands in the model's dtype. Only kernels differ from
a GPU: these multiply the codes, sum in float32 and apply the scales to the sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from megatron_leangrpo.precision.linear import fp8_linear
from megatron_leangrpo.precision.quantise import Quantised, amax, quantise, scale_of
from megatron_leangrpo.precision.recipe import Fp8Settings
from megatron_leangrpo.precision.scaling import DelayedScales


@dataclass
class ReferenceOperands:
    """The operands of one linear; inputs are `[rows, features]`, weights `[out, in]`."""

    settings: Fp8Settings
    scales: DelayedScales | None = None
    """Of delayed scaling."""
    slot: int = 0
    """Of the weight; the input's is the one before it, or that of the linear it is shared with."""
    input_slot: int = 0
    group: dist.ProcessGroup | None = None
    """Ranks that each have a part of the input's rows: one scale for all of them."""
    product: ClassVar[Callable[..., torch.Tensor] | None] = None
    """`product(rows, factor, bias, out, total)` of kernels; None: those are torch's tensors."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`x @ weight.t() + bias` on one rank, `[..., features]`."""
        return fp8_linear(x, weight, bias, self)

    def input(self, rows: torch.Tensor) -> Quantised:
        """The quantised input."""
        settings, dtype = self.settings, self.settings.forward_dtype
        scale = None
        if self.scales is not None:
            scale = self.scales.scale_of(self.input_slot, rows)
        elif settings.recipe == "current" and self.group is not None:
            largest = amax(rows)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
            scale = scale_of(largest, dtype, power_of_two=False)
        return quantise(rows, dtype, settings.vectors(), scale)

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The dequantised weight, of which backwards are made."""
        settings, scale = self.settings, None
        if self.scales is not None:
            scale = self.scales.scale_of(self.slot, weight)
        quantised = quantise(weight, settings.forward_dtype, settings.weights(), scale)
        return quantised.dequantise(weight.dtype)

    def factor(self, weight: torch.Tensor) -> Any:
        """The weight as `product` takes it."""
        return self.weight(weight)

    def rows(self, quantised: Quantised, dtype: torch.dtype) -> Any:
        """An input as `product` takes it."""
        return quantised.dequantise(dtype)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """The quantised input as one message: bytes `[rows, features + scales]`.

        A row carries the scales of its blocks behind its codes: rows can be cut and gathered.
        """
        quantised = self.input(rows)
        codes, scales = quantised.codes.view(torch.uint8), quantised.scale_inv
        scales = scales.expand(rows.shape[0], -1).contiguous().view(torch.uint8)
        return torch.cat((codes, scales), dim=1)

    def unpack(self, packed: torch.Tensor, features: int) -> Quantised:
        """The quantised input `[rows, features]` of bytes that any rank has packed."""
        settings, blocks = self.settings, self.settings.vectors()
        codes = packed[:, :features].contiguous().view(settings.forward_dtype)
        scales = packed[:, features:].contiguous()
        if not blocks.e8m0:
            scales = scales.view(torch.float32)
        return Quantised(codes, scales, blocks.by_row())
