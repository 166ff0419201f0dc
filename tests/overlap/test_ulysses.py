# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Ulysses in groups of heads: the bits of the plain exchange, traces, times, peers that fail."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.models.common.attention import CoreAttention
from megatron_leangrpo.overlap.choice import AttentionShape, choices
from megatron_leangrpo.overlap.cost_model import Costs, Flash, attention_time
from megatron_leangrpo.overlap.emulated_link import EmulatedLink, VirtualClock
from megatron_leangrpo.overlap.engine import Exchange
from megatron_leangrpo.overlap.settings import OverlapSettings
from megatron_leangrpo.overlap.trace import Event, Trace
from megatron_leangrpo.overlap.transport import TorchTransport, TransportError
from megatron_leangrpo.overlap.ulysses import OverlappedHeadExchange, attend_in_groups
from megatron_leangrpo.parallel.ulysses import HeadExchange
from tests.distributed.launcher import CONTEXT
from tests.overlap.test_choice import CARD

SIZES = (1, 2, 3, pytest.param(4, marks=pytest.mark.slow))
TOKENS, BATCH, HEAD_DIM = 5, 2, 8
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
TIMEOUT_SECONDS = 3.0


def _inputs(heads: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """This rank's packed queries and keys, values, and gradient of the output."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(100 * seed + rank)
    shapes = ((heads, 2, HEAD_DIM), (heads, HEAD_DIM), (heads * HEAD_DIM,))
    drawn = [torch.randn(TOKENS, BATCH, *shape, generator=generator) for shape in shapes]
    return [x.to(dtype) for x in drawn]


def _forward(exchange: HeadExchange, recompute: bool, qk: torch.Tensor, v: torch.Tensor):
    leaves = [x.clone().requires_grad_() for x in (qk, v)]
    return exchange.around(CoreAttention(recompute), *leaves), leaves


def _flash(heads: int, groups: int, group: dist.ProcessGroup | None) -> OverlappedHeadExchange:
    exchange = OverlappedHeadExchange(heads, group, OverlapSettings("flash", sub_slices=groups))
    exchange.prepare(f"attention of {heads} in {groups}")
    return exchange


def _differences(size: int) -> list[str]:
    """Where the groups give another bit than the plain exchange, which is attention itself."""
    platform.initialize_distributed(1, context_parallel_size=size)
    _plain_is_attention(size)
    group, wrong = platform.cp_group(), []
    # 6 and 7 heads: with pads at 4 ranks, at 2, 3 and 4; groups of different sizes among them.
    cases = itertools.product((6, 7), (1, 2, 3), (False, True))
    # Bytes travel: a dtype is nothing to the exchange.
    for (heads, groups, recompute), dtype in zip(cases, itertools.cycle(DTYPES)):
        qk, v, grad = _inputs(heads, dtype)
        results = []
        for exchange in (HeadExchange(heads, group), _flash(heads, groups, group)):
            out, leaves = _forward(exchange, recompute, qk, v)
            out.backward(grad)
            results.append((out, *(leaf.grad for leaf in leaves)))
        if not all(map(torch.equal, *results)):
            wrong.append(f"{heads} heads in {groups}, {dtype}, recompute {recompute}")
    return wrong


@pytest.mark.parametrize("size", SIZES)
def test_every_token_attends_to_all_with_the_bits_of_the_plain_exchange(run_ranks, size):
    assert run_ranks(size, _differences, size) == [[] for _ in range(size)]


def _plain_is_attention(size: int) -> None:
    """The plain exchange against attention of all tokens in one process, gathered."""
    qk, v, _ = _inputs(7, torch.float64)
    everyone = []
    for x in (qk, v):
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x, group=platform.cp_group())
        everyone.append(torch.cat(parts))
    whole = CoreAttention(False)(*everyone[0].unbind(dim=-2), everyone[1])
    out, _ = _forward(HeadExchange(7, platform.cp_group()), False, qk, v)
    # float64, and the kernel may cut the tokens otherwise than for fewer heads.
    torch.testing.assert_close(
        out, whole.chunk(size)[platform.cp_group().rank()], rtol=0, atol=1e-13
    )


def _retained() -> bool:
    """Three forwards before the backwards, which come in another order."""
    exchange = _flash(6, 3, platform.cp_group())
    inputs = [_inputs(6, torch.float32, seed) for seed in range(3)]
    at_once = []
    for qk, v, grad in inputs:
        out, leaves = _forward(exchange, False, qk, v)
        out.backward(grad)
        at_once.append([out, *(leaf.grad for leaf in leaves)])
    kept = [_forward(exchange, False, qk, v) for qk, v, _ in inputs]
    for n in (1, 2, 0):
        kept[n][0].backward(inputs[n][2])
    later = [[out, *(leaf.grad for leaf in leaves)] for out, leaves in kept]
    return all(torch.equal(*pair) for n in range(3) for pair in zip(at_once[n], later[n]))


def _auto(path: str) -> tuple[bool, int]:
    """Whether the bits are those of the plain exchange, and into how many groups it was cut."""
    platform.initialize_distributed(1, context_parallel_size=2)
    exchange = OverlappedHeadExchange(
        8, platform.cp_group(), OverlapSettings("auto", calibration=path)
    )
    exchange.prepare("attention")
    qk, v, _ = _inputs(8, torch.float32)
    outs = [_forward(e, False, qk, v)[0] for e in (exchange, HeadExchange(8, exchange.group))]
    shape = AttentionShape(2, 2 * TOKENS, BATCH, 4, HEAD_DIM, 4)
    flash = choices()[shape].flash
    return torch.equal(*outs), flash.sub_slices if flash else 1


def test_auto_cuts_as_the_cost_model_says(run_ranks, tmp_path):
    # Attention and exchange take about as long, then an exchange of nothing but latency.
    times = {"flops_per_second": 1e9, "link_bytes_per_second": 1e9, "link_latency_seconds": 0.0}
    slow = dataclasses.replace(CARD, **times)
    slow.save(tmp_path / "slow.json")
    dataclasses.replace(slow, link_latency_seconds=1.0).save(tmp_path / "late.json")
    assert run_ranks(2, _auto, str(tmp_path / "slow.json")) == [(True, 4), (True, 4)]
    assert run_ranks(2, _auto, str(tmp_path / "late.json")) == [(True, 1), (True, 1)]


def _traces(size: int) -> tuple[Trace, Trace, int]:
    """Events of a forward and of its backward, and the bytes of the plain exchange's forward."""
    platform.initialize_distributed(1, context_parallel_size=size)
    qk, v, grad = _inputs(7, torch.float32)
    exchange = _flash(7, 2, platform.cp_group())
    forward = exchange.trace = Trace()
    out, _ = _forward(exchange, False, qk, v)
    exchange.trace = None
    backward = Trace()
    # The exchanges that the graph holds keep the trace they were made with.
    forward_events, forward.events = forward.events, backward.events
    messages, sent = forward.messages, forward.bytes_sent
    out.backward(grad)
    backward.messages, backward.bytes_sent = forward.messages - messages, forward.bytes_sent - sent
    whole = []
    with mock.patch.object(
        dist, "all_to_all_single", lambda out, x, group: whole.append(x.nbytes) or out.copy_(x)
    ):
        _forward(HeadExchange(7, platform.cp_group()), False, qk, v)
    return Trace(forward_events, messages, sent), backward, sum(whole)


@pytest.mark.parametrize("size", [2, 3])
def test_a_group_waits_for_its_own_messages_alone(run_ranks, size):
    """Every event of a rank, in order: what is posted before a product travels beside it."""
    peers = range(size - 1)

    def events(kind: str, first_step: int, group: int) -> list[Event]:
        return [Event(kind, first_step + i, group) for i in peers]

    def attended(group: int) -> list[Event]:
        product = Event("product", size - 1, group)
        return [*events("wait", 0, group), product, *events("post", size, group)]

    expected_forward = [
        *events("post", 0, 0),
        *events("post", 0, 1),
        *attended(0),
        *attended(1),
        *events("wait", size, 0),
        *events("wait", size, 1),
    ]
    # The mirror image: gradients come back in groups, and leave beside the next group's backward.
    expected_backward = [
        *events("post", size, 1),
        *events("post", size, 0),
        *events("wait", size, 1),
        *events("post", 0, 1),
        *events("wait", size, 0),
        *events("post", 0, 0),
        *events("wait", 0, 1),
        *events("wait", 0, 0),
    ]
    for forward, backward, whole in run_ranks(size, _traces, size):
        assert forward.events == expected_forward
        assert backward.events == expected_backward
        # The plain all-to-alls hand every rank its share; our own never leaves the rank.
        for trace in (forward, backward):
            assert trace.messages == 2 * 2 * (size - 1)
            assert trace.bytes_sent == whole * (size - 1) // size


def _virtual_times(settings: list[tuple[Costs, int]]) -> list[float]:
    ranks = settings[0][0].ranks
    platform.initialize_distributed(1, context_parallel_size=ranks)
    transport = TorchTransport(platform.cp_group(), "test", timeout_seconds=60)
    return [_virtual_time(transport, *setting) for setting in settings]


def _virtual_time(transport: TorchTransport, costs: Costs, groups: int) -> float:
    clock, heads = VirtualClock(), 4
    packs = [torch.zeros(costs.ranks, 1, 1, heads // groups, 3, HEAD_DIM) for _ in range(groups)]
    # Three tensors there and one back, of every head.
    bandwidth = 4 * heads * HEAD_DIM * 4 / costs.hop
    link = EmulatedLink(transport, bandwidth, costs.latency, clock)
    there, back = (Exchange(link, Flash(), name) for name in ("there", "back"))

    def attend(q, k, v):
        clock.spend(costs.compute_total / groups)
        return v.flatten(2)

    attend_in_groups(attend, packs, there, back)
    return clock.now()


def test_on_a_slow_link_the_ranks_take_the_time_of_the_closed_form(run_ranks):
    links = [Costs(ranks=3, compute=1.0, hop=hop, latency=0.01) for hop in (0.3, 1.0, 4.0)]
    settings = list(itertools.product(links, (1, 2, 4)))
    expected = [attention_time(*setting) for setting in settings]
    assert run_ranks(3, _virtual_times, settings) == [pytest.approx(expected)] * 3


def _different_tokens() -> str:
    exchange = _flash(6, 2, platform.cp_group())
    exchange.prepare("blocks.3.attn")
    tokens = TOKENS + platform.cp_group().rank()
    try:
        exchange.around(
            CoreAttention(False),
            torch.ones(tokens, BATCH, 6, 2, HEAD_DIM),
            torch.ones(tokens, BATCH, 6, HEAD_DIM),
        )
    except TransportError as error:
        return str(error)
    return ""


def _on_two_ranks() -> tuple[bool, str]:
    platform.initialize_distributed(1, context_parallel_size=2)
    return _retained(), _different_tokens()


def test_retained_forwards_change_no_bit_and_different_tokens_name_rank_and_layer(run_ranks):
    for rank, (same, error) in enumerate(run_ranks(2, _on_two_ranks)):
        assert same
        assert f"rank {rank} of 2, layer blocks.3.attn (to heads)" in error
        assert "(5, 2, 6, 8)" in error and "(6, 2, 6, 8)" in error


def _dying_peer(rank: int, dies_in: str, store: str, answers: str) -> None:
    """Body of a process of its own: the launcher would end the survivor with the dead."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    with mock.patch.object(platform, "timeout_seconds", return_value=TIMEOUT_SECONDS):
        exchange = _flash(6, 2, dist.group.WORLD)
    exchange.prepare("blocks.3.attn")
    qk, v, grad = _inputs(6, torch.float32)
    _forward(exchange, False, qk, v)[0].backward(grad)
    started = time.monotonic()
    try:
        if rank == 1 and dies_in == "forward":
            os._exit(9)
        out, _ = _forward(exchange, False, qk, v)
        if rank == 1:
            os._exit(9)
        out.backward(grad)
    except TransportError as error:
        with open(answers, "w") as file:
            file.write(f"{time.monotonic() - started:.1f} {error}")
    os._exit(0)


# The transport's own test shows it every day.
@pytest.mark.slow
@pytest.mark.parametrize("dies_in", ["forward", "backward"])
def test_a_dead_peer_ends_in_an_error(tmp_path, dies_in):
    answers = tmp_path / "error"
    processes = [
        CONTEXT.Process(
            target=_dying_peer, args=(rank, dies_in, str(tmp_path / "store"), str(answers))
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    seconds, error = answers.read_text().split(" ", 1)
    assert "rank 0 of 2, layer blocks.3.attn (to heads)" in error
    assert float(seconds) < 3 * TIMEOUT_SECONDS
