# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The products of a linear: of its dtype, or of what another precision makes of its operands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F


class Quantised(Protocol):
    """Numbers in a byte each."""

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The numbers in a dtype."""


class Operands(Protocol):
    """What travels, is kept and is multiplied in place of an input and a weight (FP8)."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`x @ weight.t() + bias` where there is one rank."""

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as bytes `[rows, n]`, to be sent and kept."""

    def unpack(self, packed: torch.Tensor, features: int) -> Quantised:
        """The rows `[rows, features]` of packed ones."""

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight that gradients are multiplied with."""

    def factor(self, weight: torch.Tensor) -> Any:
        """The weight as `product` takes it."""

    def rows(self, quantised: Quantised, dtype: torch.dtype) -> Any:
        """The rows as `product` takes them."""

    product: Callable[..., torch.Tensor] | None
    """`product(rows, factor, bias, out, total)` of kernels; None: those are torch's tensors."""


@dataclass(frozen=True)
class Product:
    """Rows with one weight `[out, features]`, or packed rows with what `operand` makes of it."""

    weight: torch.Tensor
    operand: Operands | None = None
    factor: Any = None

    @classmethod
    def of(cls, weight: torch.Tensor, operand: Operands | None) -> "Product":
        """With the weight as it is multiplied in a forward."""
        return cls(weight, operand, operand.factor(weight) if operand else None)

    def rows(self, packed: torch.Tensor) -> Any:
        """Rows as `__call__` takes them; they are the same for weights of one input."""
        if self.operand is None:
            return packed
        quantised = self.operand.unpack(packed, self.weight.shape[1])
        return self.operand.rows(quantised, self.weight.dtype)

    def __call__(
        self,
        rows: Any,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        total: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`rows @ weight.t()`: a new tensor, plus `bias`; or `out`; or added into `total`."""
        factor = self.weight if self.operand is None else self.factor
        multiply = (self.operand and self.operand.product) or _product
        return multiply(rows, factor, bias, out, total)


def sum_of_products(
    inputs: Sequence[torch.Tensor],
    products: Sequence[Product],
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """All of them, added into `total` if given."""
    for x, product in zip(inputs, products):
        total = product(product.rows(x), total=total)
    assert total is not None
    return total


def _product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    total: torch.Tensor | None,
) -> torch.Tensor:
    if total is not None:
        return total.addmm_(rows, weight.t())
    if out is None:
        return F.linear(rows, weight, bias)
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)
