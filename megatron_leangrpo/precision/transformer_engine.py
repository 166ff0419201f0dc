# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The same linears through transformer-engine's kernels, on one tensor-parallel rank.

Written against the sources of transformer-engine and not run on a GPU so far. The names below are
in NVIDIA/TransformerEngine at 001597e9 (transformer_engine/pytorch/__init__.py, quantization.py)
and 000b637e (transformer_engine/common/recipe/__init__.py), both of 2026; `te.autocast` has
replaced `te.fp8_autocast`, and `backward_override` is newer than the recipes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from types import ModuleType
from typing import Any

import torch

from megatron_leangrpo.precision.recipe import Fp8Settings, pad_rows

_BACKEND = "fp8.backend = transformer_engine"
_INSTEAD = "valid here: fp8.backend = reference (slow), or fp8.recipe = none"
_RECIPES = {
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
_AVAILABLE = {
    "current": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}


def check_available(settings: Fp8Settings) -> None:
    """Raise ``ValueError`` where the recipe cannot run, in transformer-engine's words if it has."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError(f"{_BACKEND}: transformer-engine is not installed; {_INSTEAD}")
    if not torch.cuda.is_available():
        raise ValueError(f"{_BACKEND}: there is no GPU; {_INSTEAD}")
    works, reason = getattr(_pytorch(), _AVAILABLE[settings.recipe])(return_reason=True)
    if not works:
        raise ValueError(f"{_BACKEND}, fp8.recipe = {settings.recipe}: {reason} {_INSTEAD}")
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


class TransformerEngineOperands:
    """One linear as transformer-engine's own, over the weight that it is called with."""

    def __init__(self, settings: Fp8Settings) -> None:
        self._settings, self._recipe = settings, _recipe(settings)
        self._module: torch.nn.Module | None = None

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`x @ weight.t() + bias`; rows are padded to what the kernels take."""
        te = _pytorch()
        if self._module is None:
            out_features, in_features = weight.shape
            self._module = te.Linear(
                in_features, out_features, bias=False, params_dtype=weight.dtype, device="meta"
            )
            self._module.weight = weight
        rows = x.reshape(-1, x.shape[-1])
        with te.autocast(enabled=True, recipe=self._recipe):
            out = self._module(pad_rows(rows, self._settings.alignment))
        out = out[: rows.shape[0]].view(*x.shape[:-1], -1)
        return out if bias is None else out + bias
