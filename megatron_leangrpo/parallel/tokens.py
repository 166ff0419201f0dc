# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""How streams of tokens are cut over ranks, and which rows are pads when they are whole again."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class TokenLayout:
    """Token counts of the two streams and the number of ranks they are sharded over.

    Each stream is padded to a multiple of `shards`; its pads are its last rows.
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

    def joined_order(self, parts: int) -> torch.Tensor:
        """For each row of `text_0 image_0 text_1 image_1 ...`, its token, -1 for a pad.

        Text tokens count first. Either stream is cut into `parts`: the shards, or groups of shards
        that are already whole.
        """
        text = torch.arange(self.text_per_partition * self.shards)
        image = torch.arange(self.image_per_partition * self.shards) + self.text
        text[self.text :] = -1
        image[self.image :] = -1
        return torch.cat((text.view(parts, -1), image.view(parts, -1)), dim=1).flatten()


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Which rows of a stream are tokens."""

    rows: int
    """All rows, pads included."""
    tokens: int
    index: torch.Tensor | None = None
    """The rows of the tokens; the first ones where it is not given."""

    @staticmethod
    def of(order: torch.Tensor, device: torch.device) -> "TokenRows":
        """The rows whose entry in `order` is not negative."""
        index = (order >= 0).nonzero().squeeze(1)
        return TokenRows(order.numel(), index.numel(), index.to(device))

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens among the rows `[s, ...]`."""
        if self.tokens == self.rows:
            return x
        return x[: self.tokens] if self.index is None else x.index_select(0, self.index)

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `drop`, with zeros for the pads."""
        if self.tokens == self.rows:
            return x
        if self.index is None:
            return pad_tokens(x, self.rows)
        return x.new_zeros(self.rows, *x.shape[1:]).index_copy(0, self.index, x)


def pad_tokens(x: torch.Tensor, length: int) -> torch.Tensor:
    """Append zero rows to `[s, ...]` up to `length`."""
    missing = length - x.shape[0]
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
