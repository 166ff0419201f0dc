# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Where the tokens are: rotary tables in the order in which attention sees the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from megatron_leangrpo.models.common.rotary import rotary_table
from megatron_leangrpo.parallel.tokens import TokenLayout, TokenRows


@dataclass(frozen=True, eq=False)
class Positions:
    """What attention must know of one shape of input; computed once per shape.

    `paired` is text, then image, as two streams are joined; `joined` is both as they are joined in
    every shard. A rank that is alone in its context has all tokens once they are projected, and
    drops the pads there (`projected`). Otherwise they go with it to attention (`attended`). Tables
    have this rank's rows; pads, and text, which is all at the origin, are not rotated.
    """

    image: torch.Tensor
    joined: torch.Tensor
    projected_text: TokenRows
    projected_image: TokenRows
    projected_joined: TokenRows
    attended_paired: TokenRows
    attended_joined: TokenRows

    @staticmethod
    @lru_cache(maxsize=16)
    def of(
        layout: TokenLayout,
        grid: tuple[int, int],
        axes_dims: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        context: tuple[int, int],
    ) -> Positions:
        """For an image of `grid` = (rows, columns) of tokens, and `context` = (rank, ranks)."""
        wide = torch.complex128 if dtype == torch.float64 else torch.complex64
        rank, ranks = context
        text = layout.text_per_partition * layout.shards // ranks
        image = layout.image_per_partition * layout.shards // ranks
        # The first call may be a rollout in inference mode; later ones save the table for backward.
        with torch.inference_mode(False), torch.device("cpu"):
            paired, joined = layout.joined_order(ranks), layout.joined_order(layout.shards)
            # A row without rotation at the end, where -1 finds it.
            text_ids = torch.zeros(layout.text, 3, dtype=torch.int64)
            ids = torch.cat((text_ids, _image_ids(grid), text_ids.new_zeros(1, 3)))
            table = rotary_table(ids, axes_dims).to(wide)
            if ranks == 1:
                whole = TokenRows(layout.text + layout.image, layout.text + layout.image)
                rows = TokenRows.of(joined, device)
                return Positions(
                    table[layout.text : -1].to(device),
                    table[joined[joined >= 0]].to(device),
                    TokenRows(text, layout.text),
                    TokenRows(image, layout.image),
                    rows,
                    whole,
                    whole,
                )
            return Positions(
                table[paired.chunk(ranks)[rank][text:]].to(device),
                table[joined.chunk(ranks)[rank]].to(device),
                TokenRows(text, text),
                TokenRows(image, image),
                TokenRows(text + image, text + image),
                TokenRows.of(paired, device),
                TokenRows.of(joined, device),
            )


def _image_ids(grid: tuple[int, int]) -> torch.Tensor:
    rows, columns = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    return torch.stack((torch.zeros_like(rows), rows, columns), dim=-1).flatten(0, 1)
