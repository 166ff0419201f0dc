# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""How a text and an image stream are cut over sequence-parallel ranks, padding included."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class TokenLayout:
    """Token counts of the two streams and the number of ranks they are sharded over.

    Each stream is padded to a multiple of `shards`. Joined shards `[text_r | image_r]` gather to
    `text_0 image_0 text_1 image_1 ...`; pads are the last rows of each stream.
    """

    text: int
    image: int
    shards: int = 1

    @property
    def text_per_partition(self) -> int:
        """Text tokens of a rank, pads included."""
        return -(-self.text // self.shards)

    @property
    def image_per_partition(self) -> int:
        """Image tokens of a rank, pads included."""
        return -(-self.image // self.shards)

    @property
    def is_padded(self) -> bool:
        """True if a stream has rows that are no tokens."""
        return self.text % self.shards != 0 or self.image % self.shards != 0

    @cached_property
    def joined_order(self) -> torch.Tensor:
        """For each row of the gathered joined stream, its token (text first); -1 for a pad."""
        text = torch.arange(self.text_per_partition * self.shards)
        image = torch.arange(self.image_per_partition * self.shards) + self.text
        text[self.text :] = -1
        image[self.image :] = -1
        rows = torch.cat((text.view(self.shards, -1), image.view(self.shards, -1)), dim=1)
        return rows.flatten()

    @cached_property
    def joined_rows(self) -> torch.Tensor:
        """Rows of the gathered joined stream that are tokens."""
        return (self.joined_order >= 0).nonzero().squeeze(1)

    @cached_property
    def joined_tokens(self) -> torch.Tensor:
        """The tokens (text first) in the order of `joined_rows`."""
        return self.joined_order[self.joined_rows]


def pad_tokens(x: torch.Tensor, length: int) -> torch.Tensor:
    """Append zero rows to `[s, ...]` up to `length`."""
    missing = length - x.shape[0]
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
