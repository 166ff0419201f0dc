# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Attention in slices of queries beside the reduce-scatter of its projection."""

from __future__ import annotations

import dataclasses
import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron_leangrpo import platform
from megatron_leangrpo.overlap.choice import LayerShape, choices, fastest
from megatron_leangrpo.overlap.cost_model import Flash
from megatron_leangrpo.overlap.engine import Exchange
from megatron_leangrpo.overlap.linear import row_parallel
from megatron_leangrpo.overlap.plan import LinearPlan, prepare
from megatron_leangrpo.overlap.query_split import attend_later
from megatron_leangrpo.overlap.trace import Trace
from megatron_leangrpo.overlap.transport import transport_of
from tests.overlap.test_choice import CARD

BATCH, HEADS, HEAD_DIM, WIDTH = 2, 2, 8, 6
MODES = [
    None,
    Flash(),
    Flash(sub_slices=3, in_product=True),
    Flash(pattern="direct", sub_slices=2),
]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)


def _inputs(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values, another input of the projection, both weights and the bias."""
    generator = torch.Generator().manual_seed(3 + platform.tp_rank())
    inside, features = (tokens, BATCH, HEADS, HEAD_DIM), HEADS * HEAD_DIM
    shapes = [inside] * 3 + [(tokens, BATCH, 4), (WIDTH, features), (WIDTH, 4), (WIDTH,)]
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def _run(plan: LinearPlan, inputs: list[torch.Tensor], later: bool) -> list[torch.Tensor]:
    """The output, and the gradients of all inputs."""
    q, k, v, x, *weights, bias = leaves = [i.clone().requires_grad_() for i in inputs]
    attn, rows = attend_later(_attend, q, k, v) if later else (_attend(q, k, v), None)
    out = row_parallel([attn, x], weights, bias, plan, rows)
    out.backward(torch.ones_like(out) + out.detach())
    return [out.detach(), *(leaf.grad for leaf in leaves)]


# Rows do not depend on one another; the kernel sums in another order for a few of them.
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-14}


def _differences(size: int) -> float:
    """The largest difference from attention as a whole before the same projection.

    In units of what a dtype may differ by.
    """
    platform.initialize_distributed(size)
    worst = 0.0
    # 300 tokens are more than a block of queries of the kernel; 7 leave pads.
    for tokens, mode, sp in itertools.product((7, 300), MODES, (True, False)):
        plan = LinearPlan(platform.tp_group(), sp, mode, f"{tokens} {mode} {sp}")
        dtype = torch.float32 if (tokens == 7) == sp else torch.float64
        inputs = _inputs(tokens, dtype)
        for ours, theirs in zip(_run(plan, inputs, True), _run(plan, inputs, False)):
            assert ours.dtype == dtype
            difference = (ours.double() - theirs.double()).norm() / theirs.double().norm()
            worst = max(worst, difference.item() / TOLERANCES[dtype])
    return worst


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_split_queries_give_output_and_gradients_of_the_whole_attention(run_ranks, size):
    assert max(run_ranks(size, _differences, size)) < 1


def _chosen(path: str) -> tuple[float, str]:
    """The difference from the whole attention where the cost model chooses, and its choice."""
    platform.initialize_distributed(2)
    plan = LinearPlan(platform.tp_group(), True, None, "proj", calibration=path)
    prepare(plan)
    inputs = _inputs(300, torch.float32)
    ours, theirs = (_run(plan, inputs, later)[0] for later in (True, False))
    features = HEADS * HEAD_DIM
    shape = LayerShape(2, 300 * BATCH // 2, WIDTH, features + 4, 4, 4 * 300 * features)
    difference = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    return difference.item(), shape.describe(choices()[shape].flash)


def test_auto_reckons_the_attention_with_the_projection(run_ranks, tmp_path):
    path = tmp_path / "calibration.json"
    times = {"flops_per_second": 1e9, "link_bytes_per_second": 1e7}
    dataclasses.replace(CARD, **times).save(path)
    for difference, choice in run_ranks(2, _chosen, str(path)):
        assert difference < 1e-6
        assert choice.startswith("flash") and choice.endswith("queries split")


def _order(size: int, flash: Flash) -> tuple[list[tuple[str, int, int]], int]:
    """Messages and slices of queries in their order, and the tokens of a slice."""
    platform.initialize_distributed(size)
    tokens = 4 * size
    q, k, v, _, weight, _, bias = _inputs(tokens, torch.float64)
    trace, order = Trace(), []

    def attend(*heads: torch.Tensor) -> torch.Tensor:
        first = (heads[0].storage_offset() - q.storage_offset()) // q.stride(0)
        seen = [(e.kind, e.step, e.part) for e in trace.events]
        order.extend(event for event in seen if event not in order)
        order.append(("attend", first, heads[0].shape[0]))
        return _attend(*heads)

    def exchange(plan: LinearPlan, purpose: str, rows: torch.Tensor) -> Exchange:
        return Exchange(transport_of(plan.group, purpose), flash, "test", trace)

    with mock.patch.object(LinearPlan, "exchange", exchange):
        attn, rows = attend_later(attend, q, k, v)
        plan = LinearPlan(platform.tp_group(), True, flash, "test")
        row_parallel([attn], [weight], bias, plan, rows)
    torch.testing.assert_close(attn, _attend(q, k, v))
    return order, 4


@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_travels_while_the_next_queries_are_attended_to(run_ranks, size):
    flash = Flash(sub_slices=2, in_product=True)
    for rank, (order, tokens) in enumerate(run_ranks(size, _order, size, flash)):
        attended = [(first, count) for kind, first, count in order if kind == "attend"]
        # The slices of the reduce-scatter, our own last, each in two parts.
        slices = [(rank - 1 - i) % size for i in range(size)]
        assert attended == [(s * tokens + u * 2, 2) for s in slices for u in (0, 1)]
        for i in range(1, size):
            # The running sum of the part before is on its way when the queries of this one come.
            second = order.index(("attend", slices[i] * tokens + 2, 2))
            assert order.index(("post", i, 0)) < order.index(("post", i, 1))
            assert order.index(("post", i, 0)) < second


def test_an_attention_beside_a_projection_hides_what_the_projection_cannot():
    # FLUX's output projection over 4 ranks: too short for its hop by itself.
    shape = LayerShape(4, 1152, 3072, 768, 2)
    split = LayerShape(4, 1152, 3072, 768, 2, attention_flops=4 * 4608 * 768)
    alone, covered = fastest(shape, CARD), fastest(split, CARD)
    assert covered.flash is not None and "queries split" in split.describe(covered.flash)
    assert covered.exposed_seconds < 0.75 * alone.exposed_seconds
