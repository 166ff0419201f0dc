# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Ulysses: outside attention a rank has its tokens and all heads, inside all tokens and its heads.

Every rank of the context-parallel group holds as many tokens as the others. Heads that the group
does not divide are padded with zeros, which attend to nothing and are dropped afterwards. After
DeepSpeed-Ulysses (arXiv 2309.14509).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F


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

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """`[s, b, heads * w]` to `[ranks * s, b, heads_inside * w]`, tokens rank after rank."""
        if self.ranks == 1:
            return x
        s, b, features = x.shape
        x = x.reshape(s, b, self.heads, features // self.heads)
        x = F.pad(x, (0, 0, 0, self.ranks * self.heads_inside - self.heads))
        x = x.reshape(s, b, self.ranks, -1).permute(2, 0, 1, 3)
        return _AllToAll.apply(x, self.group).flatten(0, 1)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_heads`."""
        if self.ranks == 1:
            return x
        x = _AllToAll.apply(x.unflatten(0, (self.ranks, -1)), self.group).permute(1, 2, 0, 3)
        s, b = x.shape[:2]
        return x.reshape(s, b, self.ranks * self.heads_inside, -1)[:, :, : self.heads].flatten(2)
