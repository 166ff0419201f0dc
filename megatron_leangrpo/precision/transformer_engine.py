# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The same linears through transformer-engine's kernels.

Written against the sources of transformer-engine and not run on a GPU so far. The names below are
in NVIDIA/TransformerEngine at 001597e9 (transformer_engine/pytorch/__init__.py, quantization.py)
and 000b637e (transformer_engine/common/recipe/__init__.py), both of 2026; `te.autocast` has
replaced `te.fp8_autocast`, and `backward_override` is newer than the recipes. Layouts of codes and
scales are those of pytorch/tensor/{float8,mxfp8,float8_blockwise}_tensor.py at 006257e5, 00768c77
and 001b23cc.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.precision.operands import ReferenceOperands
from megatron_leangrpo.precision.quantise import Blocks, Quantised
from megatron_leangrpo.precision.recipe import Fp8Settings, pad_rows

_BACKEND = "fp8.backend = transformer_engine"
_INSTEAD = "valid here: fp8.backend = reference (slow), or fp8.recipe = none"
_RECIPES = {
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
_AVAILABLE = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}


def check_available(settings: Fp8Settings, tensor_parallel_size: int = 1) -> None:
    """Raise ``ValueError`` where the recipe cannot run, in transformer-engine's words if it has."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(f"{_BACKEND}: transformer-engine is not installed; {_INSTEAD}")
    if not torch.cuda.is_available():
        raise ValueError(f"{_BACKEND}: there is no GPU; {_INSTEAD}")
    works, reason = getattr(_pytorch(), _AVAILABLE[settings.recipe])(return_reason=True)
    if not works:
        raise ValueError(f"{_BACKEND}, fp8.recipe = {settings.recipe}: {reason} {_INSTEAD}")
    if tensor_parallel_size == 1 and not settings.is_delayed:
        _recipe(settings)


def _pytorch() -> ModuleType:
    import transformer_engine.pytorch as te

    return te


def _recipe(settings: Fp8Settings) -> Any:
    """transformer-engine's recipe; ``ValueError`` for what the installed one does not have."""
    from transformer_engine.common import recipe as recipes

    kind = getattr(recipes, _RECIPES[settings.recipe])
    options = {}
    if settings.format is not None:
        options["fp8_format"] = recipes.Format[settings.format.upper()]
    if not settings.quantises_gradients:
        if "backward_override" not in {field.name for field in dataclasses.fields(kind)}:
            raise ValueError(
                "fp8.backward = dequantized: the installed transformer-engine has no "
                "backward_override; use a newer one, or fp8.backward = quantized"
            )
        options["backward_override"] = "dequantized"
    if settings.float32_scales:
        raise ValueError(
            f"fp8.float32_scales = True: with {_BACKEND} set the environment variable "
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 instead"
        )
    return kind(**options)


@dataclass(frozen=True)
class _Rows:
    """A quantised input for the kernels, and how many of its rows are no padding."""

    tensor: Any
    count: int


@dataclass
class TransformerEngineOperands(ReferenceOperands):
    """The operands of one linear, quantised and multiplied by transformer-engine.

    Bytes travel as the reference packs them. On one rank a recipe without scales of its own is
    transformer-engine's `Linear`; the backwards of the others multiply what the codes stand for.
    """

    _module: torch.nn.Module | None = field(default=None, repr=False)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`x @ weight.t() + bias`; rows are padded to what the kernels take."""
        if self.settings.is_delayed:
            return super().linear(x, weight, bias)
        te = _pytorch()
        if self._module is None:
            out_features, in_features = weight.shape
            self._module = te.Linear(
                in_features, out_features, bias=False, params_dtype=weight.dtype, device="meta"
            )
            self._module.weight = weight
        rows = x.reshape(-1, x.shape[-1])
        with te.autocast(enabled=True, recipe=_recipe(self.settings)):
            out = self._module(pad_rows(rows, self.settings.alignment))
        out = out[: rows.shape[0]].view(*x.shape[:-1], -1)
        return out if bias is None else out + bias

    def input(self, rows: torch.Tensor) -> Quantised:
        """The quantised input."""
        quantiser = self._quantiser(rows, self.input_slot, self.settings.vectors(), self.group)
        tensor = quantiser(pad_rows(rows, self.settings.alignment))
        return _codes_and_scales(tensor, rows.shape, self.settings, self.settings.vectors())

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The dequantised weight, of which backwards are made."""
        blocks = self.settings.weights()
        tensor = self.factor(weight)
        quantised = _codes_and_scales(tensor, weight.shape, self.settings, blocks)
        return quantised.dequantise(weight.dtype)

    def factor(self, weight: torch.Tensor) -> Any:
        """transformer-engine's quantised weight."""
        weight = weight.detach()
        return self._quantiser(weight, self.slot, self.settings.weights(), None)(weight)

    def rows(self, quantised: Quantised, dtype: torch.dtype) -> _Rows:
        """transformer-engine's tensor of an input, made of its bytes."""
        blocks = self.settings.vectors()
        count = quantised.codes.shape[0]
        padded = pad_rows(quantised.codes.view(torch.uint8), self.settings.alignment)
        quantiser = self._quantiser(None, self.input_slot, blocks, None)
        tensor = quantiser.make_empty(padded.shape, dtype=dtype, device=padded.device)
        scales = quantised.scale_inv
        if blocks.columns is None:
            tensor._data.copy_(padded)
            tensor._scale_inv.copy_(scales.reshape(-1)[:1])
        else:
            tensor._rowwise_data.copy_(padded)
            target = tensor._rowwise_scale_inv.zero_()
            if not blocks.e8m0:
                target = target.t()
            target[:count, : scales.shape[1]].copy_(scales)
        return _Rows(tensor, count)

    def product(
        self,
        rows: _Rows,
        factor: Any,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        total: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`rows @ factor.t()`: a new tensor, plus `bias`; or `out`; or added into `total`.

        `general_gemm` (pytorch/cpp_extensions/gemm.py) reads a column-major product from the right:
        its A is the weight, transposed.
        """
        target, is_whole = (out if total is None else total), rows.tensor.shape[0] == rows.count
        options = {"layout": "TN", "bias": bias, "out_dtype": factor.dtype}
        if is_whole:
            options |= {"out": target, "accumulate": total is not None}
        result = _general_gemm()(factor, rows.tensor, **options)[0]
        if is_whole:
            return result
        result = result[: rows.count]
        if target is None:
            return result
        return target.copy_(result) if total is None else target.add_(result)

    def _quantiser(
        self,
        x: torch.Tensor | None,
        slot: int,
        blocks: Blocks,
        group: dist.ProcessGroup | None,
    ) -> Any:
        """Of `x`; without one only to make empty tensors."""
        te, recipe = _pytorch(), self.settings.recipe
        dtype, ways = te.DType.kFloat8E4M3, {"rowwise": True, "columnwise": False}
        device = self.scales.scale.device if x is None and self.scales else platform.device()
        if recipe == "delayed":
            scale = self.scales.scale[slot] if x is None else self.scales.scale_of(slot, x)
            largest = torch.zeros(1, device=device)
            return te.Float8Quantizer(scale.reshape(1), largest, dtype, **ways)
        if recipe == "current":
            if group is not None:
                ways |= {"with_amax_reduction": True, "amax_reduction_group": group}
            return te.Float8CurrentScalingQuantizer(dtype, device, **ways)
        if recipe == "mxfp8":
            return te.MXFP8Quantizer(dtype, **ways)
        dims = 1 if blocks.rows == 1 else 2
        return te.Float8BlockQuantizer(
            dtype, force_pow_2_scales=blocks.power_of_two, block_scaling_dim=dims, **ways
        )


def _codes_and_scales(
    tensor: Any, shape: torch.Size, settings: Fp8Settings, blocks: Blocks
) -> Quantised:
    """What is in transformer-engine's tensor, without padding."""
    if blocks.columns is None:
        codes, scales = tensor._data, tensor._scale_inv.reshape(1, 1)
    else:
        codes, scales = tensor._rowwise_data, tensor._rowwise_scale_inv
        if blocks.rows == 1 and not blocks.e8m0:
            scales = scales.t()  # Of 1 x 128 numbers they are kept by columns.
        rows, columns = (-(-size // of) for size, of in zip(shape, (blocks.rows, blocks.columns)))
        scales = scales[:rows, :columns].contiguous()
    return Quantised(codes[: shape[0]].view(settings.forward_dtype), scales, blocks)


def _general_gemm() -> Callable[..., Any]:
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    return general_gemm
