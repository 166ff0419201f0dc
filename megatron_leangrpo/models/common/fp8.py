# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which linears of a model multiply in FP8."""

from __future__ import annotations

import torch

from megatron_leangrpo.models.common.linear import (
    ColumnParallelLinear,
    JoinedRowParallelLinear,
    RowParallelLinear,
)
from megatron_leangrpo.precision.operands import ReferenceOperands
from megatron_leangrpo.precision.recipe import Fp8Settings
from megatron_leangrpo.precision.scaling import DelayedScales

Linear = ColumnParallelLinear | RowParallelLinear | JoinedRowParallelLinear


def use_fp8(transformer: torch.nn.Module, settings: Fp8Settings) -> None:
    """Have the token linears of a transformer's inner blocks multiply in FP8.

    Modulation sees one vector a sample and cross-attention's keys and values see the text: both
    keep the model's dtype, as what is outside the blocks does (embeddings, head). ``ValueError``
    where no block is left or the backend is not here.
    """
    blocks = fp8_blocks(transformer, settings.first_last_blocks_bf16)
    operands_of = _operands_of(settings, [x for linears in blocks.values() for x in linears])
    for block, linears in blocks.items():
        slots = _number(linears, settings, operands_of)
        if settings.is_delayed:
            with torch.device(linears[0].bias.device):
                block.fp8_scales = DelayedScales(slots, settings)
            for linear in linears:
                for attribute in _attributes(linear):
                    getattr(linear, attribute).scales = block.fp8_scales


def _number(
    linears: list[Linear], settings: Fp8Settings, operands_of: type[ReferenceOperands]
) -> int:
    """Give a block's linears operands, whose tensors are numbered; returns how many there are."""
    slots, shared = 0, None
    for linear in linears:
        shares = isinstance(linear, ColumnParallelLinear) and linear.shares_input
        for attribute in _attributes(linear):
            operands = operands_of(settings, group=_ranks_of_input(linear))
            if shares and shared is not None:
                operands.input_slot, operands.slot = shared, slots
            else:
                operands.input_slot, operands.slot = slots, slots + 1
            slots = operands.slot + 1
            setattr(linear, attribute, operands)
        shared = operands.input_slot if shares else None
    return slots


def _operands_of(settings: Fp8Settings, linears: list[Linear]) -> type[ReferenceOperands]:
    """What multiplies on the backend; ``ValueError`` for weights that its kernels do not take."""
    if settings.backend == "reference":
        return ReferenceOperands
    from megatron_leangrpo.precision.transformer_engine import TransformerEngineOperands

    for linear in linears:
        for name, weight in linear.named_parameters(recurse=False):
            if weight.dim() == 2 and any(size % settings.alignment for size in weight.shape):
                raise ValueError(
                    f"fp8.recipe = {settings.recipe} with fp8.backend = transformer_engine: a "
                    f"rank's {name} of a {type(linear).__name__} has the shape "
                    f"{tuple(weight.shape)}, of which both sizes must be multiples of "
                    f"{settings.alignment}; valid: fp8.recipe = current or blockwise where 16 "
                    "divides them, a smaller parallel.tensor_model_parallel_size, or "
                    "fp8.backend = reference"
                )
    return TransformerEngineOperands


def _attributes(linear: Linear) -> tuple[str, ...]:
    """Where a linear has the operands of each of its weights."""
    return ("fp8", "fp8_mlp") if isinstance(linear, JoinedRowParallelLinear) else ("fp8",)


def _ranks_of_input(linear: Linear) -> torch.distributed.ProcessGroup | None:
    """Ranks that each have a part of the tokens, all of which are multiplied with one scale."""
    is_cut = isinstance(linear, ColumnParallelLinear) and linear.takes_shards
    return linear.tp_group if is_cut else None


def fp8_blocks(
    transformer: torch.nn.Module, first_last: int
) -> dict[torch.nn.Module, list[Linear]]:
    """The linears of tokens in all blocks that are here but the `first_last` at either end."""
    count = transformer.config.num_layers
    if 2 * first_last >= count:
        raise ValueError(
            f"fp8.first_last_blocks_bf16 = {first_last} leaves none of the {count} blocks in "
            f"FP8; valid: 0 to {(count - 1) // 2}"
        )
    return {
        block: [
            module
            for module in block.modules()
            if isinstance(module, RowParallelLinear | JoinedRowParallelLinear)
            or (isinstance(module, ColumnParallelLinear) and module.takes_tokens)
        ]
        for number, block in transformer.numbered_blocks.items()
        if first_last <= number < count - first_last
    }
