# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""FP8 linears over two ranks: what is gathered, in how many bytes, and by which kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.overlap import collectives
from megatron_leangrpo.overlap.cost_model import Flash
from megatron_leangrpo.overlap.linear import column_parallel, row_parallel
from megatron_leangrpo.overlap.plan import LinearPlan, prepare
from megatron_leangrpo.overlap.transport import TorchTransport
from megatron_leangrpo.precision.operands import ReferenceOperands
from megatron_leangrpo.precision.quantise import Quantised, quantise
from megatron_leangrpo.precision.recipe import Fp8Settings
from megatron_leangrpo.precision.scaling import DelayedScales
from megatron_leangrpo.precision.transformer_engine import TransformerEngineOperands
from tests.precision.stand_in import transformer_engine

RECIPES = ("delayed", "current", "blockwise", "mxfp8")
DTYPES = (torch.bfloat16, torch.float32)
HIDDEN, SHARD, ROWS = 192, 160, 21
"""Features: no multiple of blockwise's 128. Rows of a rank: of no kernel's 16 or 32."""


def tokens(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """`[s, b, h]`; ranks have different maxima."""
    generator = torch.Generator().manual_seed(rank)
    return ((1 + 3 * rank) * torch.randn(ROWS // 3, 3, HIDDEN, generator=generator)).to(dtype)


def scales_of(settings: Fp8Settings) -> DelayedScales | None:
    if not settings.is_delayed:
        return None
    scales = DelayedScales(4, settings)
    scales.scale.copy_(torch.tensor([20.0, 64.0, 0.5, 64.0]))
    return scales


@contextmanager
def sent_by_gathers(found: list[torch.Tensor]) -> Iterator[None]:
    """Notes what this rank sends for gathers of a forward, whole or in slices."""
    whole, slices = collectives.all_gather, TorchTransport.exchange

    def all_gather(x, group):
        found.append(x)
        return whole(x, group)

    def exchange(self, send, receive, message, layer):
        if layer.endswith("(gather)"):
            found.append(send)
        return slices(self, send, receive, message, layer)

    with (
        mock.patch.object(collectives, "all_gather", all_gather),
        mock.patch.object(TorchTransport, "exchange", exchange),
    ):
        yield


@dataclasses.dataclass
class Watched(ReferenceOperands):
    """Notes the inputs that it multiplies."""

    multiplied: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def rows(self, quantised: Quantised, dtype: torch.dtype) -> torch.Tensor:
        self.multiplied.append(super().rows(quantised, dtype))
        return self.multiplied[-1]


def _gathered(dtype: torch.dtype) -> list[tuple[str, int, int, bool]]:
    """Recipe, bytes sent in FP8 and without, whether in as many messages.

    What was multiplied is compared here.
    """
    group, found = platform.tp_group(), []
    rank = group.rank()
    weight = torch.randn(SHARD, HIDDEN, generator=torch.Generator().manual_seed(9)).to(dtype)
    for flash in (None, Flash(sub_slices=2)):
        plain = LinearPlan(group, True, flash, "fc")
        prepare(plain)
        without: list[torch.Tensor] = []
        with sent_by_gathers(without), torch.no_grad():
            column_parallel(tokens(rank, dtype), [weight], [None], plain)
        for recipe in RECIPES:
            settings = Fp8Settings(recipe)
            operands = Watched(settings, scales_of(settings), 1, 0, group)
            plan = dataclasses.replace(plain, operands=(operands,))
            sent: list[torch.Tensor] = []
            with sent_by_gathers(sent), torch.no_grad():
                (out,) = column_parallel(tokens(rank, dtype), [weight], [None], plan)
            # A rank begins with its own slices.
            rows = torch.cat(operands.multiplied)
            rows = rows if flash is None or rank == 0 else rows.roll(ROWS, 0)
            everyones = torch.cat([tokens(r, dtype).flatten(0, 1) for r in range(2)])
            scale = operands.scales.scale[0] if operands.scales else None
            whole = quantise(everyones, settings.forward_dtype, settings.vectors(), scale)
            assert torch.equal(rows, whole.dequantise(dtype)), recipe
            expected = rows.float() @ operands.weight(weight).float().t()
            torch.testing.assert_close(out.flatten(0, 1).float(), expected, rtol=1e-2, atol=1e-1)
            bytes_sent = [sum(x.nbytes for x in messages) for messages in (sent, without)]
            found.append((recipe, *bytes_sent, len(sent) == len(without)))
    return found


def _both_linears(recipe: str, flash: Flash | None, kernels: type) -> list[torch.Tensor]:
    """Output and all gradients of a column- and a row-parallel linear."""
    group, settings = platform.tp_group(), Fp8Settings(recipe)
    scales = scales_of(settings)
    first = kernels(settings, scales, 1, 0, group)
    second = kernels(settings, scales, 3, 2)
    plan = LinearPlan(group, True, flash, "fc", operands=(first,))
    prepare(plan)
    generator = torch.Generator().manual_seed(10 + group.rank())
    up, down = (
        torch.randn(*shape, generator=generator).div_(12).requires_grad_()
        for shape in ((SHARD, HIDDEN), (HIDDEN, SHARD))
    )
    bias = torch.ones(SHARD, requires_grad=True)
    x = tokens(group.rank(), torch.float32).requires_grad_()
    (hidden,) = column_parallel(x, [up], [bias], plan)
    out = row_parallel([hidden], [down], None, dataclasses.replace(plan, operands=(second,)))
    out.backward(torch.ones_like(out))
    return [out.detach(), x.grad, up.grad, down.grad, bias.grad]


def _with_kernels() -> list[str]:
    """On a stand-in with transformer-engine's signatures and layouts."""
    for recipe in RECIPES:
        for flash in (None, Flash(sub_slices=2), Flash(sub_slices=2, in_product=True)):
            expected = _both_linears(recipe, flash, ReferenceOperands)
            with transformer_engine():
                actual = _both_linears(recipe, flash, TransformerEngineOperands)
            for a, e in zip(actual, expected):
                # The same numbers; kernels are given more rows, which sum in another order.
                torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-3)
    return list(RECIPES)


def _on_two_ranks() -> tuple[list[list[tuple[str, int, int, bool]]], list[str]]:
    platform.initialize_distributed(2)
    return [_gathered(dtype) for dtype in DTYPES], _with_kernels()


def test_quantising_before_the_gather_gives_its_bits_and_kernels_do_it_inside(run_ranks):
    behind = {"delayed": 4, "current": 4, "blockwise": 8, "mxfp8": 6}
    for by_dtype, with_kernels in run_ranks(2, _on_two_ranks):
        assert with_kernels == list(RECIPES)
        for dtype, found in zip(DTYPES, by_dtype):
            assert len(found) == 2 * len(RECIPES)
            for recipe, sent, without, as_many in found:
                # A byte a number and the scales of a row's blocks, in as many messages.
                assert sent == ROWS * (HIDDEN + behind[recipe])
                assert without == ROWS * HIDDEN * dtype.itemsize and as_many


def test_delayed_scaling_with_kernels_on_one_rank():
    settings = Fp8Settings("delayed")
    x, weight = tokens(0, torch.float32), torch.randn(SHARD, HIDDEN)
    results = []
    with transformer_engine():
        for kernels in (ReferenceOperands, TransformerEngineOperands):
            scales = scales_of(settings)
            inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
            with scales.recording():
                out = kernels(settings, scales, 1, 0).linear(*inputs, None)
            out.sum().backward()
            results.append((out.detach(), *(one.grad for one in inputs), scales.amax_history))
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected)
