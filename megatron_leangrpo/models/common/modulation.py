# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Adaptive layer normalisation: the conditioning vector shifts, scales and gates each block."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_leangrpo.models.common.linear import ColumnParallelLinear
from megatron_leangrpo.models.common.norms import plain_norm
from megatron_leangrpo.parallel.mappings import gather_features


class Modulation(torch.nn.Module):
    """`chunks` vectors `[b, h]` from the activated conditioning vector `[b, h]`.

    More than a quarter of FLUX's weights are here, so they are sharded; the result is gathered.
    """

    def __init__(self, config: TransformerConfig, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.sequence_parallel = config.sequence_parallel
        hidden = config.hidden_size
        self.linear = ColumnParallelLinear(hidden, chunks * hidden, config, takes_all_tokens=True)

    def forward(self, vec: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = gather_features(self.linear(vec), self.linear.tp_group, self.sequence_parallel)
        return out.chunk(self.chunks, dim=-1)


def modulated_norm(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Layer normalisation of `[s, b, h]` without weights of its own, then scale and shift."""
    return torch.addcmul(shift, plain_norm(x), 1 + scale)


def gated_residual(x: torch.Tensor, gate: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """`x + gate * update` in one pass, computed in the widest of their dtypes, in that of `x`."""
    return torch.addcmul(x, gate, update).to(x.dtype)
