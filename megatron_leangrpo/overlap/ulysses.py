# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Ulysses in groups of heads: a group is attended to while the next one travels, and the last one.

Groups know nothing of each other, so cutting changes no bit. All groups leave for their heads at
once; each is attended to when it has come, and goes back to its tokens beside the attention of the
next. What stays exposed is the way there of the first group and the way back of the last.

Each way is a pair of autograd nodes, a departure and an arrival. autograd runs what is ready in the
reverse order of the forward, so the backward is the same pipeline: the gradients of all groups
leave first, and those of queries, keys and values travel beside the next group's backward.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_leangrpo.overlap.choice import AttentionShape, calibration_of_all_ranks, choose
from megatron_leangrpo.overlap.cost_model import Flash
from megatron_leangrpo.overlap.engine import Arriving, Exchange, start_all_to_all
from megatron_leangrpo.overlap.schedule import sub_slices
from megatron_leangrpo.overlap.settings import OverlapSettings
from megatron_leangrpo.overlap.trace import Trace
from megatron_leangrpo.overlap.transport import transport_of
from megatron_leangrpo.parallel.ulysses import Attend, HeadExchange, packed

TO_HEADS, TO_TOKENS = "to heads", "to tokens"


class OverlappedHeadExchange(HeadExchange):
    """The exchanges around an attention, overlapped with it where its settings say so."""

    def __init__(
        self, heads: int, group: dist.ProcessGroup | None, settings: OverlapSettings
    ) -> None:
        super().__init__(heads, group)
        self.settings = settings
        self.layer = "attention"
        """What errors call it."""
        self.trace: Trace | None = None

    def prepare(self, layer: str) -> None:
        """Name the attention and connect its ranks; every process of the world must come to it."""
        self.layer = layer
        if self.ranks == 1 or self.settings.mode not in ("flash", "auto"):
            return
        if self.settings.mode == "auto":
            assert self.settings.calibration is not None
            calibration_of_all_ranks(self.settings.calibration)
        for purpose in (TO_HEADS, TO_TOKENS):
            transport_of(self.group, purpose)

    def around(self, attend: Attend, qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As the plain exchange, bit for bit."""
        flash = self._flash(v) if self.ranks > 1 else None
        sizes = [b - a for a, b in sub_slices(self.heads_inside, flash.sub_slices if flash else 1)]
        if len(sizes) == 1:
            return super().around(attend, qk, v)
        qks, vs = self.by_rank(qk).split(sizes, dim=3), self.by_rank(v).split(sizes, dim=3)
        there, back = (self._exchange(way, flash, v) for way in (TO_HEADS, TO_TOKENS))
        groups = (packed(*group) for group in zip(qks, vs))
        return self.joined(torch.cat(attend_in_groups(attend, groups, there, back), dim=-1))

    def _flash(self, v: torch.Tensor) -> Flash | None:
        if self.settings.mode != "auto":
            return self.settings.flash
        s, b, _, head_dim = v.shape
        shape = AttentionShape(
            self.ranks, s * self.ranks, b, self.heads_inside, head_dim, v.element_size()
        )
        assert self.settings.calibration is not None
        return choose(self.settings.calibration, shape).flash

    def _exchange(self, purpose: str, flash: Flash, v: torch.Tensor) -> Exchange:
        transport = transport_of(self.group, purpose)
        layer = f"{self.layer} ({purpose})"
        transport.check_agreement(layer, v.shape, v.dtype)
        return Exchange(transport, flash, layer, self.trace)


def attend_in_groups(
    attend: Attend, groups: Iterable[torch.Tensor], there: Exchange, back: Exchange
) -> list[torch.Tensor]:
    """Each group `[ranks, s, b, heads, 3, head_dim]` to `[ranks, s, b, heads * head_dim]`.

    In a trace the first `ranks - 1` steps bring a group, the next one is its attention, and the
    last `ranks - 1` take it back.
    """
    ranks = there.transport.size
    coming, leaving = deque(), []
    for u, x in enumerate(groups):
        way = _Way(there, back, 0, u)
        coming.append((_Depart.apply(x, way), way))
    for u in range(len(coming)):
        # What a group took there is kept by nobody but its backward.
        x = _Arrive.apply(*coming.popleft())
        there.record("product", ranks - 1, u)
        out = attend(*x.flatten(0, 1).unbind(dim=-2))
        way = _Way(back, there, ranks, u)
        leaving.append((_Depart.apply(out.view(ranks, -1, *out.shape[1:]), way), way))
    return [_Arrive.apply(x, way) for x, way in leaving]


@dataclass
class _Way:
    """One group's way between its departure and its arrival, and its gradient's way back."""

    forward: Exchange
    backward: Exchange
    first_step: int
    part: int
    arriving: Arriving | None = None

    def start(self, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        """Send `x`; what is returned is filled when `finish` returns."""
        self.arriving = start_all_to_all(x, exchange, self.first_step, self.part)
        return self.arriving.rows

    def finish(self, x: torch.Tensor) -> None:
        """Wait for what `start` returned."""
        assert self.arriving is not None and x.data_ptr() == self.arriving.rows.data_ptr()
        self.arriving.wait()
        self.arriving = None


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        return way.start(x, way.forward)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.way.finish(grad)
        return grad, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, way: _Way) -> torch.Tensor:
        ctx.way = way
        way.finish(x)
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.way.start(grad, ctx.way.backward), None
