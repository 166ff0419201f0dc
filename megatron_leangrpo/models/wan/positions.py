# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Where a video's tokens are: rotary tables over time, rows and columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from megatron_leangrpo.models.common.rotary import rotary_table
from megatron_leangrpo.parallel.tokens import TokenRows, pad_tokens


def axes_dims(head_dim: int) -> tuple[int, int, int]:
    """Rotary dimensions of (frame, row, column); 44, 42 and 42 of 128."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


@lru_cache(maxsize=16)
def video_table(
    grid: tuple[int, int, int], head_dim: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Unit complex numbers `[s, head_dim / 2]` of `grid` = (frames, rows, columns) of tokens.

    `dtype` is the real dtype that rotates.
    """
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64
    # The first call may be a rollout in inference mode; later ones save the table for backward.
    with torch.inference_mode(False), torch.device("cpu"):
        axes = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
        places = torch.stack(axes, dim=-1).flatten(0, 2)
        return rotary_table(places, axes_dims(head_dim)).to(wide).to(device)


@dataclass(frozen=True, eq=False)
class VideoRows:
    """Which of a rank's rows are tokens, and how they are rotated.

    A rank that is alone in its context has all tokens once they are projected, and drops the pads
    there. Otherwise they go with it to attention, and the table has rows for them.
    """

    table: torch.Tensor
    projected: TokenRows
    attended: TokenRows

    @staticmethod
    def of(table: torch.Tensor, rows: int, context: tuple[int, int]) -> VideoRows:
        """For the table of all tokens, all `rows`, and `context` = (rank, ranks)."""
        rank, ranks = context
        tokens = table.shape[0]
        if ranks == 1:
            return VideoRows(table, TokenRows(rows, tokens), TokenRows(tokens, tokens))
        own = rows // ranks
        table = pad_tokens(table, rows)[rank * own : (rank + 1) * own]
        return VideoRows(table, TokenRows(own, own), TokenRows(rows, tokens))
