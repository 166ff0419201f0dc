# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Layer normalisation with weights of its own."""

import torch
import torch.nn.functional as F

from megatron_leangrpo.models.common.modulation import LAYER_NORM_EPS


class LayerNorm(torch.nn.Module):
    """Computed in the dtype of its weights, and rounded to that of its input at the end."""

    def __init__(self, size: int, dtype: torch.dtype, eps: float = LAYER_NORM_EPS) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(self.weight.dtype)
        return F.layer_norm(wide, self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)
