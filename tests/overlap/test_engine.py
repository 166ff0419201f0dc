# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The loops on real ranks: values and their order of summation, traces, times on a slow link."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.overlap.cost_model import Costs, Flash, flash_time
from megatron_leangrpo.overlap.emulated_link import EmulatedLink, VirtualClock
from megatron_leangrpo.overlap.engine import (
    Exchange,
    Reduction,
    all_gather_products,
    products_reduce_scatter,
    start_all_to_all,
)
from megatron_leangrpo.overlap.schedule import sub_slices
from megatron_leangrpo.overlap.trace import Trace
from megatron_leangrpo.overlap.transport import Alone, Pending, TorchTransport, Transport

SIZES = (1, 2, 3, pytest.param(4, marks=pytest.mark.slow))
ROWS, INNER, OUT = 7, 5, 6
FLASH = [
    Flash(pattern=pattern, sub_slices=m, in_product=in_product)
    for pattern, in_product in (("ring", False), ("ring", True), ("direct", False))
    for m in (1, 2, 3)
]
DTYPES = (torch.float32, torch.bfloat16)


def _transport(size: int) -> Transport:
    platform.initialize_distributed(size)
    group = platform.tp_group()
    return TorchTransport(group, "test", timeout_seconds=60) if size > 1 else Alone()


def _floats(rank: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


class _Poison:
    """A transport that fails when a buffer changes while it is sent, and spoils it afterwards."""

    def __init__(self, inner: Transport) -> None:
        self.rank, self.size, self._inner = inner.rank, inner.size, inner

    def exchange(self, send, receive, message, layer) -> Pending:
        before = send.clone()
        receive.fill_(float("nan"))
        pending = self._inner.exchange(send, receive, message, layer)

        class Checked:
            def wait(self) -> None:
                pending.wait()
                assert torch.equal(before, send), "a buffer was written while it was sent"

        return Checked()


def _reduce_scatter(
    transport: Transport, flash: Flash, dtype: torch.dtype, sum_dtype=None, rows: int = 0
) -> tuple[torch.Tensor, Trace]:
    size, rank = transport.size, transport.rank
    rows = rows or size * ROWS
    x = _floats(rank, rows, INNER, dtype=dtype)
    weight = _floats(50 + rank, OUT, INNER, dtype=dtype)

    def produce(start, stop, total):
        if total is None:
            return x[start:stop] @ weight.t()
        return total.addmm_(x[start:stop], weight.t())

    reduction = Reduction(rows, ROWS, OUT, dtype, torch.device("cpu"), sum_dtype)
    trace = Trace()
    out = products_reduce_scatter(reduction, produce, Exchange(transport, flash, "row", trace))
    return out, trace


def _same_order(size: int, owner: int, flash: Flash, dtype: torch.dtype, sum_dtype=None):
    """The sum of the owner's slice, alone in one process, in the documented order."""
    wide = torch.promote_types(dtype, torch.float32)
    parts = []
    for start, stop in sub_slices(ROWS, flash.sub_slices):
        first = owner * ROWS
        total = None
        ring = [(owner + 1 + i) % size for i in range(size)]
        for rank in ring if flash.pattern == "ring" else [*reversed(ring[:-1]), owner]:
            x = _floats(rank, size * ROWS, INNER, dtype=dtype)[first + start : first + stop]
            weight = _floats(50 + rank, OUT, INNER, dtype=dtype)
            if total is not None and flash.in_product and sum_dtype is None:
                total = torch.addmm(total, x, weight.t())
            elif total is None:
                total = (x @ weight.t()).to(
                    wide if flash.pattern == "direct" else sum_dtype or dtype
                )
            else:
                total = total + x @ weight.t()
        parts.append(total.to(dtype))
    return torch.cat(parts)


def _reduce_scatter_cases(transport: Transport) -> list[str]:
    wrong = []
    for flash, dtype in itertools.product(FLASH, DTYPES):
        for sum_dtype in (None, torch.float32) if dtype == torch.bfloat16 else (None,):
            out, trace = _reduce_scatter(_Poison(transport), flash, dtype, sum_dtype)
            again, _ = _reduce_scatter(transport, flash, dtype, sum_dtype)
            expected = _same_order(transport.size, transport.rank, flash, dtype, sum_dtype)
            if not torch.equal(out, expected):
                wrong.append(f"{flash} {dtype} sums in another order")
            if not torch.equal(out, again):
                wrong.append(f"{flash} {dtype} differs between two runs")
            element = (sum_dtype if flash.pattern == "ring" and sum_dtype else dtype).itemsize
            _check_messages(trace, transport.size, flash, ROWS * OUT * element)
            _check_reduce_scatter_trace(trace, transport.size, flash, sum_dtype)
    return wrong


def _check_messages(trace: Trace, size: int, flash: Flash, slice_bytes: int) -> None:
    assert trace.messages == (size - 1) * flash.sub_slices
    assert trace.bytes_sent == (size - 1) * slice_bytes


def _check_reduce_scatter_trace(trace: Trace, size: int, flash: Flash, sum_dtype) -> None:
    if size == 1:
        return
    last, parts = size - 1, range(flash.sub_slices)
    position = trace.position
    waits = [e for e in trace.events if e.kind == "wait"]
    assert len(waits) == last * len(parts)
    final_product = position("product", last, parts[-1])
    # Nothing is sent after the last product: it is our own slice's.
    assert all(trace.events.index(e) < final_product for e in trace.events if e.kind == "post")
    if flash.pattern == "direct":
        for i, u in itertools.product(range(last), parts):
            assert position("product", i, u) < position("post", i, u)
            assert position("product", i + 1, u) < position("wait", i, u)
        return
    fused = flash.in_product and sum_dtype is None
    for i, u in itertools.product(range(1, size), parts):
        assert position("post", i, u) < position("product", i, u)
        if fused:
            assert position("wait", i, u) < position("product", i, u)
        else:
            assert position("product", i, u) < position("wait", i, u)
    after = [e for e in trace.events[final_product:] if e.kind == "wait"]
    assert len(after) == (0 if fused else len(parts))
    assert position("product", 0) < min(trace.events.index(e) for e in waits)


def _all_gather_cases(transport: Transport) -> None:
    for flash, dtype in itertools.product(FLASH, DTYPES):
        x = _floats(transport.rank, ROWS, INNER, dtype=dtype)
        out = torch.full((transport.size * ROWS, INNER), float("nan"), dtype=dtype)

        def consume(start, rows, out=out):
            out[start : start + len(rows)] = rows * 2

        trace = Trace()
        # Every second column of a wider tensor: what arrives may be any view.
        view = torch.empty(ROWS, INNER * 2, dtype=dtype)[:, ::2].copy_(x)
        exchange = Exchange(_Poison(transport), flash, "column", trace)
        gathered = all_gather_products(view, consume, exchange)
        everyone = [_floats(r, ROWS, INNER, dtype=dtype) for r in range(transport.size)]
        assert torch.equal(gathered, torch.cat(everyone))
        assert torch.equal(out, torch.cat(everyone) * 2)
        if transport.size > 1:
            _check_messages(trace, transport.size, flash, ROWS * INNER * dtype.itemsize)
        waits = [e for e in trace.events if e.kind == "wait"]
        # The first slice's products wait for nothing, those of step i for the hop before.
        for i, u in itertools.product(range(1, transport.size), range(flash.sub_slices)):
            assert trace.position("wait", i - 1, u) < trace.position("product", i, u)
            assert trace.position("post", i - 1, u) < trace.position("product", i - 1, u)
        if waits:
            last_of_first = trace.position("product", 0, flash.sub_slices - 1)
            assert trace.events.index(waits[0]) > last_of_first


def _all_to_all_cases(transport: Transport) -> None:
    """Two on their way at once, of which every second column is sent."""
    size = transport.size
    trace = Trace()
    exchange = Exchange(_Poison(transport), Flash(), "a2a", trace)
    sent = torch.empty(2, size, 3, 4)[..., ::2].copy_(
        _floats(transport.rank, 2, size, 3, 2, dtype=torch.float32)
    )
    arriving = [start_all_to_all(x, exchange, part=u) for u, x in enumerate(sent)]
    for u, one in enumerate(arriving):
        one.wait()
        for source in range(size):
            theirs = _floats(source, 2, size, 3, 2, dtype=torch.float32)
            assert torch.equal(one.rows[source], theirs[u, transport.rank])
    assert trace.messages == 2 * (size - 1)
    assert trace.bytes_sent == 2 * (size - 1) * 3 * 2 * 4
    kinds = [event.kind for event in trace.events]
    assert kinds == ["post"] * 2 * (size - 1) + ["wait"] * 2 * (size - 1)


def _padding_cases(transport: Transport) -> None:
    """One row less than the slices hold, and so few that a rank has pads alone."""
    for flash, missing in itertools.product(FLASH, (1, ROWS + 2)):
        rows = transport.size * ROWS - missing
        if rows <= 0:
            continue
        out, _ = _reduce_scatter(transport, flash, torch.float64, rows=rows)
        total = sum(
            _floats(r, rows, INNER, dtype=torch.float64)
            @ _floats(50 + r, OUT, INNER, dtype=torch.float64).t()
            for r in range(transport.size)
        )
        padded = torch.nn.functional.pad(total, (0, 0, 0, missing))
        first = transport.rank * ROWS
        torch.testing.assert_close(out, padded[first : first + ROWS])


def _loops(size: int) -> list[str]:
    transport = _transport(size)
    _all_gather_cases(transport)
    _all_to_all_cases(transport)
    _padding_cases(transport)
    return _reduce_scatter_cases(transport)


@pytest.mark.parametrize("size", SIZES)
def test_values_order_of_sums_and_traces(run_ranks, size):
    assert run_ranks(size, _loops, size) == [[] for _ in range(size)]


def _virtual_times(settings: list[tuple[Costs, str, Flash]]) -> list[float]:
    """Each setting's time on a rank whose products and link take virtual time."""
    transport = _transport(settings[0][0].ranks)
    rows, features = 8, 4
    times = []
    for costs, collective, flash in settings:
        clock = VirtualClock()
        bandwidth = rows * features * 4 / costs.hop
        link = EmulatedLink(transport, bandwidth, costs.latency, clock)
        exchange = Exchange(link, flash, collective)

        def work(count, clock=clock, costs=costs):
            clock.spend(costs.compute * count / rows)

        def produce(start, stop, total, work=work):
            work(stop - start)
            return torch.zeros(stop - start, features) if total is None else total

        if collective == "all-gather":
            all_gather_products(
                torch.zeros(rows, features), lambda _, x, work=work: work(len(x)), exchange
            )
        else:
            reduction = Reduction(
                rows * costs.ranks, rows, features, torch.float32, torch.device("cpu")
            )
            products_reduce_scatter(reduction, produce, exchange)
        times.append(clock.now())
    return times


def test_on_a_slow_link_the_ranks_take_the_time_of_the_closed_form(run_ranks):
    """In virtual time, so the test neither sleeps nor depends on the machine."""
    modes = [
        ("all-gather", Flash()),
        ("all-gather", Flash(sub_slices=4)),
        ("reduce-scatter", Flash()),
        ("reduce-scatter", Flash(sub_slices=4, in_product=True)),
        ("reduce-scatter", Flash(pattern="direct")),
    ]
    links = [Costs(ranks=4, compute=1.0, hop=hop, latency=0.01) for hop in (0.6, 0.9, 1.5)]
    settings = [(costs, *mode) for costs, mode in itertools.product(links, modes)]
    expected = [flash_time(*setting) for setting in settings]
    for times in run_ranks(4, _virtual_times, settings):
        assert times == pytest.approx(expected, rel=0.02)
