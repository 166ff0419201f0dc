# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""How one linear is sharded and how it talks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.overlap.choice import LayerShape, calibration_of_all_ranks, choose
from megatron_leangrpo.overlap.cost_model import Flash
from megatron_leangrpo.overlap.engine import Exchange
from megatron_leangrpo.overlap.products import Operands, Product
from megatron_leangrpo.overlap.transport import transport_of
from megatron_leangrpo.overlap.weight_grad import WeightGradient

GATHER, SCATTER = "gather", "scatter"
_TO_AUTOGRAD = WeightGradient()


@dataclass(frozen=True)
class LinearPlan:
    """How one layer is sharded and how it talks."""

    group: dist.ProcessGroup | None
    sequence_parallel: bool
    flash: Flash | None
    """None for bulk."""
    layer: str
    """What errors call it."""
    reduces_input_grad: bool = True
    """False where the caller sums the input's gradient over the ranks (without SP only)."""
    sum_dtype: torch.dtype | None = None
    """What a ring's running sum is kept and sent in; the dtype of the products by default."""
    weight_gradient: WeightGradient = _TO_AUTOGRAD
    calibration: str | None = None
    """Where given, `flash` is chosen by the cost model for the tokens of each call."""
    operands: tuple[Operands, ...] = ()
    """One for each weight where the linear multiplies something else than its dtype."""

    def chosen(
        self, rows: int, whole: int, sharded: int, element_bytes: int, attention: int = 0
    ) -> "LinearPlan":
        """The plan for a slice of `rows` and the features that are whole and sharded.

        `attention` is the operations of an attention that is computed with a row.
        """
        if self.calibration is None:
            return self
        shape = LayerShape(self.size, rows, whole, sharded, element_bytes, attention)
        return replace(self, flash=choose(self.calibration, shape).flash, calibration=None)

    def sent_bytes(self, x: torch.Tensor) -> int:
        """Bytes of a number of `x` on its way, but for scales."""
        return 1 if self.operands else x.element_size()

    def packed(self, rows: torch.Tensor, position: int = 0) -> torch.Tensor:
        """An input as it travels and is kept; several weights of one input take the first's."""
        return self.operands[position].pack(rows) if self.operands else rows

    def unpacked(self, rows: torch.Tensor, weight: torch.Tensor, position: int = 0) -> torch.Tensor:
        """An input of `weight` `[out, features]` as gradients are multiplied with it."""
        if not self.operands:
            return rows
        return self.operands[position].unpack(rows, weight.shape[1]).dequantise(weight.dtype)

    def multiplied(self, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The weights as gradients are multiplied with them."""
        if not self.operands:
            return weights
        return [operand.weight(weight) for operand, weight in zip(self.operands, weights)]

    def products(self, weights: Sequence[torch.Tensor]) -> list[Product]:
        """What a forward multiplies inputs with, as they travel."""
        operands = self.operands or [None] * len(weights)
        return [Product.of(weight, operand) for weight, operand in zip(weights, operands)]

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return platform.group_size(self.group)

    @property
    def shards_tokens(self) -> bool:
        """Whether the tokens are sharded between the linears."""
        return self.sequence_parallel and self.size > 1

    def exchange(self, purpose: str, rows: torch.Tensor) -> Exchange:
        """The way to talk about `rows`, after all ranks agree that they have as many."""
        assert self.flash is not None
        transport = transport_of(self.group, purpose)
        layer = f"{self.layer} ({purpose})"
        transport.check_agreement(layer, rows.shape, rows.dtype)
        return Exchange(transport, self.flash, layer)


def prepare(plan: LinearPlan) -> None:
    """Connect the ranks of a layer; every process of the world must come to it."""
    if plan.calibration is not None:
        calibration_of_all_ranks(plan.calibration)
    if plan.calibration is not None or plan.flash is not None:
        for purpose in (GATHER, SCATTER):
            transport_of(plan.group, purpose)
