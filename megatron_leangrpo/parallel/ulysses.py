# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Ulysses: outside attention a rank has its tokens and all heads, inside all tokens and its heads.

Every rank of the context-parallel group holds as many tokens as the others. Heads that the group
does not divide are padded with zeros, which attend to nothing and are dropped afterwards. After
DeepSpeed-Ulysses (arXiv 2309.14509).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries, keys and values `[s, b, heads, head_dim]` to `[s, b, heads * head_dim]`."""


class _AllToAll(torch.autograd.Function):
    """Sends row j of `[ranks, ...]` to rank j and returns the rows that came; its own inverse."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None


class HeadExchange:
    """The two exchanges around an attention.

    Args:
        heads: heads of this rank outside attention, so after tensor parallelism.
        group: the context-parallel group; a group of one, or None, leaves tensors as they are.
    """

    def __init__(self, heads: int, group: dist.ProcessGroup | None) -> None:
        self.heads, self.group = heads, group
        self.ranks = 1 if group is None else group.size()
        self.heads_inside = -(-heads // self.ranks)

    def around(self, attend: Attend, qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`[s, b, heads * head_dim]` of this rank's tokens, which attend to those of all ranks.

        `qk` is `[s, b, heads, 2, head_dim]` and `v` `[s, b, heads, head_dim]`; `attend` is given
        the tokens rank after rank.
        """
        if self.ranks == 1:
            return attend(*qk.unbind(dim=-2), v)
        arrived = _AllToAll.apply(packed(self.by_rank(qk), self.by_rank(v)), self.group)
        out = attend(*arrived.flatten(0, 1).unbind(dim=-2))
        out = out.view(self.ranks, -1, *out.shape[1:])
        return self.joined(_AllToAll.apply(out, self.group))

    def by_rank(self, x: torch.Tensor) -> torch.Tensor:
        """`[s, b, heads, ...]` as `[ranks, s, b, heads_inside, ...]`: the heads of each rank."""
        missing = self.ranks * self.heads_inside - self.heads
        if missing:
            x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, missing))
        return x.unflatten(2, (self.ranks, -1)).movedim(2, 0)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """`[ranks, s, b, heads_inside * w]` as `[s, b, heads * w]`: all heads of a token."""
        x = x.unflatten(-1, (self.heads_inside, -1)).movedim(0, 2).flatten(2, 3)
        return x[:, :, : self.heads].flatten(2)


def packed(qk: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values of every head side by side, so that they travel together."""
    return torch.cat((qk, v.unsqueeze(-2)), dim=-2)
