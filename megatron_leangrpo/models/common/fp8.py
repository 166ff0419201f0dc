# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which linears of a model multiply in FP8, and where the scales of a model are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from megatron_leangrpo import platform
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
        from megatron_leangrpo.precision.transformer_engine import TransformerEngine

        engine = TransformerEngine(settings)
        _assign(linears, lambda slot, group: engine.operands())
        return
    scales = None
    if settings.is_delayed:
        weights = sum(1 + isinstance(linear, JoinedRowParallelLinear) for linear in linears)
        with torch.device(linears[0].bias.device):
            scales = DelayedScales(_SLOTS * weights, settings)
        transformer.fp8_scales = scales
    _assign(linears, lambda slot, group: ReferenceOperands(settings, scales, slot, group))


def _assign(linears: list[Linear], make) -> None:
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


def delayed_scales(model: torch.nn.Module) -> dict[str, DelayedScales]:
    """The scales of delayed scaling by name: of no, one or several transformers."""
    return {n: module for n, module in model.named_modules() if isinstance(module, DelayedScales)}


@contextmanager
def recording_scales(model: torch.nn.Module) -> Iterator[None]:
    """Forwards inside count for the next scales."""
    with ExitStack() as stack:
        for scales in delayed_scales(model).values():
            stack.enter_context(scales.recording())
        yield


def renew_scales(model: torch.nn.Module) -> None:
    """Begin with new scales (a collective of all ranks where there are any)."""
    for scales in delayed_scales(model).values():
        scales.renew()


def sharded_scales(model: torch.nn.Module) -> dict[str, object]:
    """The scales for megatron's distributed checkpoints; every rank has the same."""
    from megatron.core.utils import make_sharded_tensor_for_checkpoint

    groups = {"tp_group": platform.tp_group(), "dp_cp_group": platform.dp_cp_group()}
    return {
        f"{name}.{key}": make_sharded_tensor_for_checkpoint(buffer, f"fp8.{name}.{key}", **groups)
        for name, scales in delayed_scales(model).items()
        for key, buffer in scales.named_buffers()
    }


def load_scales(model: torch.nn.Module, loaded: dict[str, torch.Tensor]) -> None:
    """Put stored scales in place."""
    for name, scales in delayed_scales(model).items():
        for key, buffer in scales.named_buffers():
            buffer.copy_(loaded[f"{name}.{key}"])
