# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which linears of a model multiply in FP8."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_leangrpo.models.common.linear import (
    ColumnParallelLinear,
    JoinedRowParallelLinear,
    RowParallelLinear,
)
from megatron_leangrpo.overlap.plan import Operands
from megatron_leangrpo.precision.operands import ReferenceOperands
from megatron_leangrpo.precision.recipe import Fp8Settings
from megatron_leangrpo.precision.scaling import DelayedScales

Linear = ColumnParallelLinear | RowParallelLinear | JoinedRowParallelLinear
_BLOCKS = ("double_blocks", "single_blocks", "blocks")
_SLOTS = 2
"""Scales of a product: the input's and the weight's."""


def use_fp8(transformer: torch.nn.Module, settings: Fp8Settings) -> None:
    """Have the token linears of a transformer's inner blocks multiply in FP8.

    Modulation sees one vector a sample and cross-attention's keys and values see the text: both
    keep the model's dtype, as what is outside the blocks does (embeddings, head). ``ValueError``
    where no block is left or the backend is not here.
    """
    linears = fp8_linears(transformer, settings.first_last_blocks_bf16)
    if settings.backend == "transformer_engine":
        from megatron_leangrpo.precision.transformer_engine import TransformerEngineOperands

        _assign(linears, lambda slot, group: TransformerEngineOperands(settings))
        return
    scales = None
    if settings.is_delayed:
        weights = sum(1 + isinstance(linear, JoinedRowParallelLinear) for linear in linears)
        with torch.device(linears[0].bias.device):
            scales = DelayedScales(_SLOTS * weights, settings)
        transformer.fp8_scales = scales
    _assign(linears, lambda slot, group: ReferenceOperands(settings, scales, slot, group))


def _assign(linears: Sequence[Linear], make: Callable[..., Operands]) -> None:
    slot = 0

    def following(group: torch.distributed.ProcessGroup | None = None) -> Operands:
        nonlocal slot
        made = make(slot, group)
        slot += _SLOTS
        return made

    for linear in linears:
        if isinstance(linear, ColumnParallelLinear):
            # Ranks that each have a part of the tokens multiply all of them with one scale.
            linear.fp8 = following(linear.tp_group if linear.takes_shards else None)
        else:
            linear.fp8 = following()
        if isinstance(linear, JoinedRowParallelLinear):
            linear.fp8_mlp = following()


def fp8_linears(transformer: torch.nn.Module, first_last: int) -> list[Linear]:
    """The linears of tokens in all blocks but the `first_last` at either end."""
    blocks = [block for name in _BLOCKS for block in getattr(transformer, name, ())]
    if 2 * first_last >= len(blocks):
        raise ValueError(
            f"fp8.first_last_blocks_bf16 = {first_last} leaves none of the {len(blocks)} blocks in "
            f"FP8; valid: 0 to {(len(blocks) - 1) // 2}"
        )
    return [
        module
        for block in blocks[first_last : len(blocks) - first_last]
        for module in block.modules()
        if isinstance(module, RowParallelLinear | JoinedRowParallelLinear)
        or (isinstance(module, ColumnParallelLinear) and module.takes_tokens)
    ]
