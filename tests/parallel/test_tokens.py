# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Where tokens and pads lie when two streams are cut over ranks and joined."""

from __future__ import annotations

import pytest
import torch

from megatron_leangrpo.parallel.tokens import TokenLayout, TokenRows, pad_tokens


@pytest.mark.parametrize(
    ("text", "image", "shards"), [(7, 15, 2), (7, 15, 4), (8, 16, 4), (2, 5, 4), (512, 2025, 2)]
)
def test_joined_order_is_what_padding_cutting_joining_and_gathering_gives(text, image, shards):
    layout = TokenLayout(text, image, shards)
    txt = pad_tokens(torch.arange(text), layout.text_per_partition * shards)
    img = pad_tokens(torch.arange(text, text + image), layout.image_per_partition * shards)
    gathered = torch.cat([x for pair in zip(txt.chunk(shards), img.chunk(shards)) for x in pair])
    order = layout.joined_order(shards)
    rows = TokenRows.of(order, torch.device("cpu"))
    kept = rows.drop(gathered)
    assert torch.equal(kept, order[order >= 0])
    assert torch.equal(kept.sort().values, torch.arange(text + image))
    restored = rows.restore(kept + 1)
    assert torch.equal(restored, torch.where(order >= 0, gathered + 1, 0))


def test_one_shard_has_the_order_of_the_tokens_and_no_pads():
    assert torch.equal(TokenLayout(7, 15).joined_order(1), torch.arange(22))
    x = torch.ones(7, 2, 3)
    assert pad_tokens(x, 7) is x


def test_pads_are_zero_rows_at_the_end():
    padded = pad_tokens(torch.ones(3, 2, 2), 5)
    assert padded.shape == (5, 2, 2)
    assert padded[:3].eq(1).all() and padded[3:].eq(0).all()


@pytest.mark.parametrize(("shards", "parts"), [(4, 2), (4, 1), (6, 3)])
def test_shards_that_are_already_whole_count_as_one(shards, parts):
    """As over tensor-parallel ranks, whose tokens a projection gathers before the exchange."""
    layout = TokenLayout(7, 15, shards)
    txt = pad_tokens(torch.arange(7) + 1, layout.text_per_partition * shards)
    img = pad_tokens(torch.arange(7, 22) + 1, layout.image_per_partition * shards)
    joined = torch.cat([x for pair in zip(txt.chunk(parts), img.chunk(parts)) for x in pair])
    assert torch.equal(layout.joined_order(parts) + 1, joined)


def test_tokens_before_all_pads_are_kept_without_a_copy():
    x = torch.arange(5.0)[:, None] + 1
    rows = TokenRows(5, 3)
    kept = rows.drop(x)
    assert kept.data_ptr() == x.data_ptr() and len(kept) == 3
    assert torch.equal(rows.restore(kept), torch.tensor([1.0, 2, 3, 0, 0])[:, None])
    assert TokenRows(5, 5).drop(x) is x and TokenRows(5, 5).restore(x) is x
