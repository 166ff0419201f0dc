# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The feed-forward part of a block."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_leangrpo.models.common.linear import ColumnParallelLinear, RowParallelLinear


class MLP(MegatronModule):
    """Two linears with tanh-approximated GELU between."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.linear_fc1 = ColumnParallelLinear(config.hidden_size, config.ffn_hidden_size, config)
        self.linear_fc2 = RowParallelLinear(config.ffn_hidden_size, config.hidden_size, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))
