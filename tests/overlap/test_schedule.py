# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Every order and every peer up to 16 ranks: no rank waits for what never comes."""

from itertools import pairwise

import pytest

from megatron_leangrpo.overlap.schedule import (
    PATTERNS,
    all_gather_order,
    all_gather_steps,
    all_to_all_steps,
    reduce_scatter_steps,
    ring_reduce_scatter_order,
    sub_slices,
)

SIZES = range(1, 17)
KINDS = {
    **{f"all-gather {p}": (lambda r, n, p=p: all_gather_steps(r, n, p)) for p in PATTERNS},
    **{f"reduce-scatter {p}": (lambda r, n, p=p: reduce_scatter_steps(r, n, p)) for p in PATTERNS},
    "all-to-all": all_to_all_steps,
}


def test_the_orders_of_four_ranks_are_the_published_ones():
    gather = [all_gather_order(rank, 4) for rank in range(4)]
    assert gather == [[0, 3, 2, 1], [1, 0, 3, 2], [2, 1, 0, 3], [3, 2, 1, 0]]
    scatter = [ring_reduce_scatter_order(rank, 4) for rank in range(4)]
    assert scatter == [[3, 2, 1, 0], [0, 3, 2, 1], [1, 0, 3, 2], [2, 1, 0, 3]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_every_slice_is_computed_once_and_the_own_one_where_it_costs_no_wait(kind, size):
    for rank in range(size):
        order = [step.compute for step in KINDS[kind](rank, size)]
        assert sorted(order) == list(range(size))
        assert order[0 if kind.startswith("all-gather") else -1] == rank


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_in_every_step_each_rank_sends_once_and_receives_that_very_slice(kind, size):
    steps = [KINDS[kind](rank, size) for rank in range(size)]
    messages = 0
    for i in range(size):
        sent = {}
        for rank in range(size):
            message = steps[rank][i].message
            if message is not None:
                messages += 1
                sent[message.to] = (rank, message.sends)
        received = {
            rank: (steps[rank][i].message.source, steps[rank][i].message.receives)
            for rank in range(size)
            if steps[rank][i].message is not None
        }
        assert sent == received
    assert messages == size * (size - 1)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("size", SIZES)
def test_an_all_gather_has_received_what_it_computes_and_what_it_sends(pattern, size):
    for rank in range(size):
        held = {rank}
        for step in all_gather_steps(rank, size, pattern):
            assert step.compute in held
            if step.message:
                assert step.message.sends in held
                held.add(step.message.receives)
        assert held == set(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_sums_every_partial_product_once_beginning_after_the_owner(size):
    steps = [reduce_scatter_steps(rank, size, "ring") for rank in range(size)]
    sums = [{} for _ in range(size)]
    for i in range(size):
        arrived = [
            list(sums[(rank - 1) % size].get(steps[rank][i].compute, [])) for rank in range(size)
        ]
        for rank in range(size):
            sums[rank] = {steps[rank][i].compute: arrived[rank] + [rank]}
    for rank in range(size):
        assert sums[rank] == {rank: [(rank + 1 + i) % size for i in range(size)]}


@pytest.mark.parametrize("size", SIZES)
def test_direct_partial_sums_reach_their_owner_in_one_fixed_order(size):
    for rank in range(size):
        messages = [step.message for step in reduce_scatter_steps(rank, size, "direct")][:-1]
        assert [m.source for m in messages] == [(rank - 1 - i) % size for i in range(size - 1)]
        assert all(m.receives == rank and m.to == m.sends for m in messages)


@pytest.mark.parametrize(("rows", "count"), [(8, 4), (7, 4), (3, 4), (1, 2), (0, 2), (5, 1)])
def test_sub_slices_cover_the_rows_without_an_empty_one(rows, count):
    bounds = sub_slices(rows, count)
    assert len(bounds) == max(1, min(rows, count))
    assert bounds[0][0] == 0 and bounds[-1][1] == rows
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    lengths = [stop - start for start, stop in bounds]
    assert max(lengths) - min(lengths) <= 1
