# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Where a weight's gradient goes: to autograd, or added to megatron's gradient buffer."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron_leangrpo import platform


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


def fuses_here() -> bool:
    """Whether a kernel is here that adds a product to a float32 gradient; kernels need a GPU."""
    return not platform.is_host() and _kernel() is not None


@functools.cache
def _kernel() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object] | None:
    """`kernel(rows, grad, main_grad)` of apex or else of transformer-engine.

    The first is what megatron-core's own layers call (tensor_parallel/layers.py), the second what
    transformer-engine's do with `accumulate_wgrad_into_param_main_grad` (module/linear.py).
    """
    try:
        import fused_weight_gradient_mlp_cuda

        return fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
    except ImportError:
        pass
    try:
        from transformer_engine.pytorch.cpp_extensions import general_gemm
    except ImportError:
        return None

    def add_product(rows: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        how = {"layout": "NT", "grad": True, "accumulate": True, "out_dtype": main_grad.dtype}
        general_gemm(rows, grad, out=main_grad, **how)

    return add_product


def _add_product(main_grad: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> None:
    kernel = _kernel() if main_grad.dtype == torch.float32 else None
    if kernel is not None:
        kernel(rows.contiguous(), grad.contiguous(), main_grad)
    elif main_grad.dtype == grad.dtype:
        main_grad.addmm_(grad.t(), rows)
    else:
        main_grad.add_(grad.t() @ rows)
