# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""An FP8 recipe in transformer-engine's terms: formats, and the blocks that share a scale."""

from dataclasses import dataclass

import torch

from megatron_leangrpo.precision.quantise import E4M3, E5M2, TENSOR, Blocks

RECIPES = ("delayed", "current", "blockwise", "mxfp8")


@dataclass(frozen=True)
class Fp8Settings:
    """How the linears of a model multiply in FP8. Defaults are transformer-engine's."""

    recipe: str
    backend: str = "reference"
    """reference quantises and dequantises in torch; transformer_engine has the kernels."""
    backward: str = "dequantized"
    """What gradients are multiplied with, see `quantises_gradients`."""
    format: str | None = None
    """e4m3 or hybrid; None is the recipe's own."""
    first_last_blocks_bf16: int = 0
    """Blocks at either end that keep the model's dtype."""
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    margin: int = 0
    float32_scales: bool = False
    """blockwise: scales need not be powers of two."""

    @property
    def is_delayed(self) -> bool:
        """Whether scales come from earlier iterations."""
        return self.recipe == "delayed"

    @property
    def quantises_gradients(self) -> bool:
        """Whether the backward rounds gradients to FP8: it is then no longer linear in them."""
        return self.backward == "quantized"

    @property
    def gradient_dtype(self) -> torch.dtype:
        """FP8 format of gradients; that of inputs and weights is E4M3."""
        own = "hybrid" if self.recipe in ("delayed", "current") else "e4m3"
        return E5M2 if (self.format or own) == "hybrid" else E4M3

    @property
    def forward_dtype(self) -> torch.dtype:
        """FP8 format of inputs and weights."""
        return E4M3

    def vectors(self, along_rows: bool = False) -> Blocks:
        """Blocks of inputs and gradients: along the features, or along the rows for products that
        sum over rows. For those both copies are made of the unquantised tensor."""
        if self.recipe == "blockwise":
            blocks = (128, 1) if along_rows else (1, 128)
            return Blocks(*blocks, power_of_two=not self.float32_scales)
        if self.recipe == "mxfp8":
            return Blocks(*((32, 1) if along_rows else (1, 32)), e8m0=True)
        return TENSOR

    def weights(self, along_rows: bool = False) -> Blocks:
        """Blocks of a weight `[out, in]`; along the rows for the input's gradient."""
        if self.recipe == "blockwise":
            return Blocks(128, 128, power_of_two=not self.float32_scales)
        return self.vectors(along_rows)

    @property
    def alignment(self) -> int:
        """Rows and features that the kernels take are multiples of this.

        `assert_dim_for_fp8_exec` (pytorch/utils.py: 8 and 16), `get_align_size_for_quantization`
        (pytorch/quantization.py: 16, MXFP8 32).
        """
        return 32 if self.recipe == "mxfp8" else 16


def pad_rows(x: torch.Tensor, alignment: int) -> torch.Tensor:
    """`[rows, features]` filled up with rows of zeros.

    They change no scale and no other row: a maximum of magnitudes does not see zeros.
    """
    missing = -x.shape[0] % alignment
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
