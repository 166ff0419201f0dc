# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The overlapped loops: a product of one slice runs while another slice travels.

The engine orders products and messages and knows nothing of what is computed. Rows are the
flattened tokens of a tensor, and slice `j` is the `j`-th part of them. Buffers belong to one call:
what a graph keeps is never written again, however many forwards precede the first backward.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_leangrpo.overlap.cost_model import Flash
from megatron_leangrpo.overlap.lane import Lane
from megatron_leangrpo.overlap.schedule import (
    Step,
    all_gather_steps,
    all_to_all_steps,
    reduce_scatter_steps,
    sub_slices,
)
from megatron_leangrpo.overlap.trace import Kind, Trace
from megatron_leangrpo.overlap.transport import Pending, Transport

Consume = Callable[[int, torch.Tensor], None]
"""`consume(start, rows)`: compute with gathered rows that begin at row `start` of all of them."""

Produce = Callable[[int, int, torch.Tensor | None], torch.Tensor]
"""`produce(start, stop, total)`: the partial product of those rows, added into `total` if given."""


@dataclass(frozen=True)
class Exchange:
    """How one operation talks: over what, in which pattern, and under which name in errors."""

    transport: Transport
    flash: Flash
    layer: str
    trace: Trace | None = None

    def post(
        self, step: Step, i: int, u: int, send: torch.Tensor, receive: torch.Tensor
    ) -> Pending:
        """Start the message of a step and sub-slice."""
        assert step.message is not None
        if self.trace:
            self.trace.record("post", i, u)
            self.trace.sent(send.nbytes)
        return self.transport.exchange(send, receive, step.message, self.layer)

    def record(self, kind: Kind, i: int, u: int) -> None:
        """Note an event for whoever asked for a trace."""
        if self.trace:
            self.trace.record(kind, i, u)


def _walk(
    steps: Sequence[Step], rows: int, parts: int
) -> Iterator[tuple[int, Step, int, int, int]]:
    """Step number, step, and the number and bounds of a sub-slice, in the order of the products."""
    for i, step in enumerate(steps):
        for u, (start, stop) in enumerate(sub_slices(rows, parts)):
            yield i, step, u, start, stop


def all_gather_products(x: torch.Tensor, consume: Consume, exchange: Exchange) -> torch.Tensor:
    """Every rank's rows of `x` `[rows, d]`, each consumed as soon as it is here, our own first.

    Returns the gathered `[ranks * rows, d]`. Nothing is summed over ranks: the result has the bits
    of gathering first and consuming slice by slice.
    """
    transport, rows = exchange.transport, x.shape[0]
    if transport.size == 1:
        exchange.record("product", 0, 0)
        consume(0, x)
        return x
    x = x.contiguous()
    gathered = x.new_empty(transport.size * rows, *x.shape[1:])
    steps = all_gather_steps(transport.rank, transport.size, exchange.flash.pattern)
    lane = Lane(x.device)
    pending: dict[int, Pending] = {}

    def slice_of(number: int, start: int, stop: int) -> torch.Tensor:
        if number == transport.rank:
            return x[start:stop]
        return gathered[number * rows + start : number * rows + stop]

    for i, step, u, start, stop in _walk(steps, rows, exchange.flash.sub_slices):
        arrived = pending.pop(u, None)
        if arrived is not None:
            # A rank passes on what it has received, so the next hop waits for this one as well.
            with lane.beside():
                arrived.wait()
            exchange.record("wait", i - 1, u)
        if step.message is not None:
            with lane.beside():
                send = slice_of(step.message.sends, start, stop)
                receive = slice_of(step.message.receives, start, stop)
                pending[u] = exchange.post(step, i, u, send, receive)
        if arrived is not None and x.is_cuda:
            arrived.wait()
        exchange.record("product", i, u)
        consume(step.compute * rows + start, slice_of(step.compute, start, stop))
    gathered[transport.rank * rows : (transport.rank + 1) * rows] = x
    lane.join()
    return gathered


@dataclass(frozen=True)
class Reduction:
    """What a reduce-scatter sums."""

    rows: int
    """Rows of the whole product; those up to a multiple of the ranks count as zeros."""
    slice_rows: int
    """Rows each rank keeps."""
    features: int
    dtype: torch.dtype
    device: torch.device
    sum_dtype: torch.dtype | None = None
    """What the running sum of a ring is kept and sent in; the dtype of the products by default."""

    def new(self, rows: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor of rows of the product."""
        return torch.empty(rows, self.features, dtype=dtype or self.dtype, device=self.device)

    def part(
        self, produce: Produce, start: int, stop: int, total: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The product of rows that may lie behind the last one."""
        if stop <= self.rows:
            return produce(start, stop, total)
        if total is None:
            total = self.new(stop - start).zero_()
        if start < self.rows:
            produce(start, self.rows, total[: self.rows - start])
        return total


def products_reduce_scatter(
    reduction: Reduction, produce: Produce, exchange: Exchange
) -> torch.Tensor:
    """This rank's rows `[slice_rows, features]` of the sum of all ranks' products.

    The order of every sum is fixed: in a ring slice `s` is summed over the ranks `s+1, s+2, ...,
    s`; direct sums run in float32 (or wider) over `r-1, r-2, ..., r`.
    """
    transport, flash = exchange.transport, exchange.flash
    if transport.size == 1:
        exchange.record("product", 0, 0)
        return reduction.part(produce, 0, reduction.slice_rows)
    steps = reduce_scatter_steps(transport.rank, transport.size, flash.pattern)
    if flash.pattern == "direct":
        return _direct(reduction, produce, exchange, steps)
    if flash.in_product and reduction.sum_dtype in (None, reduction.dtype):
        return _ring_in_product(reduction, produce, exchange, steps)
    return _ring(reduction, produce, exchange, steps)


def _ring(
    reduction: Reduction, produce: Produce, exchange: Exchange, steps: Sequence[Step]
) -> torch.Tensor:
    """Products wait for nothing; the sums are added beside them."""
    rows, last = reduction.slice_rows, len(steps) - 1
    dtype = reduction.sum_dtype or reduction.dtype
    lane = Lane(reduction.device)
    out = reduction.new(rows, dtype)
    # Hop i lands in one of two buffers and is summed there; hop i + 1 sends it from there, and hop
    # i + 2 may land there, because the wait for hop i + 1 covers its send.
    buffers = [reduction.new(rows, dtype) for _ in range(min(2, last - 1))]
    total: dict[int, torch.Tensor] = {}
    pending: dict[int, Pending] = {}
    held: list[tuple] = []

    def finish(i: int, u: int, product: torch.Tensor, landing: torch.Tensor, mark) -> None:
        with lane.beside(mark, uses=product):
            if i == 0:
                total[u] = product.to(dtype)
                return
            pending.pop(u).wait()
            exchange.record("wait", i, u)
            total[u] = landing.add_(product)
            exchange.record("add", i, u)

    parts = len(sub_slices(rows, exchange.flash.sub_slices))
    for i, step, u, start, stop in _walk(steps, rows, parts):
        landing = (out if i == last else buffers[(i - 1) % 2])[start:stop] if i else out[:0]
        if step.message is not None:
            with lane.beside():
                pending[u] = exchange.post(step, i, u, total[u], landing)
        exchange.record("product", i, u)
        first = step.compute * rows
        product = reduction.part(produce, first + start, first + stop).contiguous()
        held.append((i, u, product, landing, lane.mark()))
        if len(held) == parts:
            finish(*held.pop(0))
    for entry in held:
        finish(*entry)
    lane.join()
    return out.to(reduction.dtype)


def _ring_in_product(
    reduction: Reduction, produce: Produce, exchange: Exchange, steps: Sequence[Step]
) -> torch.Tensor:
    """The running sum is the product's own addend, so no addition is left.

    With two sub-slices or more, one travels while the other is computed.
    """
    rows, last = reduction.slice_rows, len(steps) - 1
    out = reduction.new(rows)
    buffers = [reduction.new(rows) for _ in range(min(2, last - 1))]
    landing: dict[int, torch.Tensor] = {}
    pending: dict[int, Pending] = {}
    for i, step, u, start, stop in _walk(steps, rows, exchange.flash.sub_slices):
        addend = None
        if i:
            pending.pop(u).wait()
            exchange.record("wait", i, u)
            addend = landing[u]
        exchange.record("product", i, u)
        first = step.compute * rows
        total = reduction.part(produce, first + start, first + stop, addend)
        if i < last:
            landing[u] = (out if i + 1 == last else buffers[i % 2])[start:stop]
            pending[u] = exchange.post(steps[i + 1], i + 1, u, total.contiguous(), landing[u])
    return out


def _direct(
    reduction: Reduction, produce: Produce, exchange: Exchange, steps: Sequence[Step]
) -> torch.Tensor:
    """Every partial sum goes straight to its owner, who adds them in one order in float32."""
    rows, last = reduction.slice_rows, len(steps) - 1
    wide = torch.promote_types(reduction.dtype, torch.float32)
    lane = Lane(reduction.device)
    out = reduction.new(rows, wide)
    staging = [reduction.new(rows) for _ in range(min(2, last))]
    pending: dict[int, Pending] = {}

    def add(i: int, u: int, start: int, stop: int) -> None:
        pending.pop(u).wait()
        exchange.record("wait", i, u)
        arrived = staging[i % 2][start:stop]
        out[start:stop].copy_(arrived) if i == 0 else out[start:stop].add_(arrived)
        exchange.record("add", i, u)

    for i, step, u, start, stop in _walk(steps, rows, exchange.flash.sub_slices):
        exchange.record("product", i, u)
        first = step.compute * rows
        product = reduction.part(produce, first + start, first + stop).contiguous()
        with lane.beside(lane.mark(), uses=product):
            previous = pending.get(u)
            if step.message is not None:
                receive = staging[i % 2][start:stop]
                message = exchange.post(step, i, u, product, receive)
            if previous is not None:
                add(i - 1, u, start, stop)
            if step.message is not None:
                pending[u] = message
            else:
                out[start:stop].add_(product)
                exchange.record("add", i, u)
    lane.join()
    return out.to(reduction.dtype)


@dataclass(frozen=True)
class Arriving:
    """An all-to-all on its way."""

    rows: torch.Tensor
    """`[ranks, ...]`: what each rank has sent us, once it is here."""
    exchange: Exchange
    pending: Sequence[Pending]
    first_step: int
    part: int

    def wait(self) -> None:
        """Let what follows see the rows."""
        for i, message in enumerate(self.pending):
            message.wait()
            self.exchange.record("wait", self.first_step + i, self.part)


def start_all_to_all(
    x: torch.Tensor, exchange: Exchange, first_step: int = 0, part: int = 0
) -> Arriving:
    """Start to send row `j` of `[ranks, ...]` to rank `j`; the rest names its events in a trace."""
    transport = exchange.transport
    x = x.contiguous()
    rows, pending = torch.empty_like(x), []
    for i, step in enumerate(all_to_all_steps(transport.rank, transport.size)):
        if step.message is not None:
            send, receive = x[step.message.sends], rows[step.message.source]
            pending.append(exchange.post(step, first_step + i, part, send, receive))
    rows[transport.rank] = x[transport.rank]
    return Arriving(rows, exchange, pending, first_step, part)
