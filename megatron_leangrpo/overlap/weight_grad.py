# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Where a weight's gradient goes: to autograd, or added to megatron's gradient buffer."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class WeightGradient:
    """What megatron's flags ask for; the default hands the gradient to autograd."""

    fused: bool = False
    """`gradient_accumulation_fusion`: add to `weight.main_grad`, where a weight has one."""
    deferred: list[Callable[[], None]] | None = field(default=None, compare=False)
    """Collects the products for `run_deferred` instead of computing them; needs `fused`."""

    def of(
        self, weight: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor | None:
        """`grad.t() @ rows`, or what autograd is given when it has gone elsewhere."""
        main_grad = getattr(weight, "main_grad", None) if self.fused else None
        if main_grad is None:
            return grad.t() @ rows
        if self.deferred is None:
            _add_product(main_grad, grad, rows)
        else:
            self.deferred.append(lambda: _add_product(main_grad, grad, rows))
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        # megatron's hook fires only for a weight that autograd gives some gradient; it ignores it.
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight)

    def run_deferred(self) -> None:
        """Compute what was put off, in the order of the backward."""
        while self.deferred:
            self.deferred.pop(0)()


def _add_product(main_grad: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> None:
    if main_grad.dtype == grad.dtype:
        main_grad.addmm_(grad.t(), rows)
    else:
        main_grad.add_(grad.t() @ rows)
