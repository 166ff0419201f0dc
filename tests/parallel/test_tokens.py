# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Where tokens and pads lie when two streams are cut over ranks and joined."""

from __future__ import annotations

import pytest
import torch

from megatron_leangrpo.parallel.tokens import TokenLayout, pad_tokens


@pytest.mark.parametrize(
    ("text", "image", "shards"), [(7, 15, 2), (7, 15, 4), (8, 16, 4), (2, 5, 4), (512, 2025, 2)]
)
def test_joined_order_is_what_padding_cutting_joining_and_gathering_gives(text, image, shards):
    layout = TokenLayout(text, image, shards)
    txt = pad_tokens(torch.arange(text), layout.text_per_partition * shards)
    img = pad_tokens(torch.arange(text, text + image), layout.image_per_partition * shards)
    gathered = torch.cat([x for pair in zip(txt.chunk(shards), img.chunk(shards)) for x in pair])
    kept = gathered[layout.joined_rows]
    assert torch.equal(kept, layout.joined_tokens)
    assert torch.equal(kept.sort().values, torch.arange(text + image))
    assert layout.is_padded == (len(gathered) != text + image)


def test_one_shard_has_the_order_of_the_tokens_and_no_pads():
    layout = TokenLayout(7, 15)
    assert torch.equal(layout.joined_tokens, torch.arange(22))
    assert not layout.is_padded
    x = torch.ones(7, 2, 3)
    assert pad_tokens(x, 7) is x


def test_pads_are_zero_rows_at_the_end():
    padded = pad_tokens(torch.ones(3, 2, 2), 5)
    assert padded.shape == (5, 2, 2)
    assert padded[:3].eq(1).all() and padded[3:].eq(0).all()
