# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Where the tokens are: rotary tables in the order in which attention sees the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from megatron_leangrpo.models.common.rotary import rotary_table
from megatron_leangrpo.parallel.tokens import TokenLayout


@dataclass(frozen=True, eq=False)
class Positions:
    """Token layout and rotary tables of one shape of input; computed once per shape.

    `image` is for image tokens, `joined` for both kinds in the order in which joined shards gather;
    neither has rows for pads. Text tokens are all at the origin.
    """

    layout: TokenLayout
    image: torch.Tensor
    joined: torch.Tensor
    joined_rows: torch.Tensor | None

    @staticmethod
    @lru_cache(maxsize=16)
    def of(
        layout: TokenLayout,
        grid: tuple[int, int],
        axes_dims: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Positions:
        """The positions of `layout` when the image is `grid` = (rows, columns) of tokens."""
        wide = torch.complex128 if dtype == torch.float64 else torch.complex64
        # The first call may be a rollout in inference mode; later ones save the table for backward.
        with torch.inference_mode(False), torch.device("cpu"):
            rows, columns = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
            image_ids = torch.stack((torch.zeros_like(rows), rows, columns), dim=-1).flatten(0, 1)
            text_ids = image_ids.new_zeros(layout.text, 3)
            image = rotary_table(image_ids, axes_dims).to(wide)
            joined = torch.cat((rotary_table(text_ids, axes_dims).to(wide), image))
            return Positions(
                layout,
                image.to(device),
                joined[layout.joined_tokens].to(device),
                layout.joined_rows.to(device) if layout.is_padded else None,
            )

    def drop_pads(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens among the gathered joined rows `[s, ...]`."""
        return x if self.joined_rows is None else x.index_select(0, self.joined_rows)

    def restore_pads(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `drop_pads`, with zeros for the pads."""
        if self.joined_rows is None:
            return x
        rows = self.layout.joined_order.numel()
        return x.new_zeros(rows, *x.shape[1:]).index_copy(0, self.joined_rows, x)
