# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""An attention whose rows are computed when the projection behind it multiplies them.

A reduce-scatter cut into slices asks for one slice of tokens after the other. Attending to all keys
with the queries of a slice only then makes the attention part of what a hop can hide behind: a
projection alone is often too short for that. The backward recomputes the attention, as megatron's
selective recomputation does, and is not cut.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

AttendRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries, keys and values `[s, b, heads, head_dim]` to `[s, b, heads * head_dim]`, row by row."""


@dataclass(frozen=True)
class LaterRows:
    """The rows of an attention's output that are still to be computed."""

    attend: AttendRows
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor

    @property
    def flops_per_row(self) -> int:
        """Of one row of the output, which is one token of one sample."""
        return 4 * self.k.shape[0] * self.q.shape[2] * self.q.shape[3]

    def fill(self, start: int, stop: int) -> None:
        """Compute rows of the flattened `[s * b, ...]`; slices begin and end between tokens.

        Parts of a slice need not: the token they share is computed with the earlier part.
        """
        batch = self.q.shape[1]
        first, last = -(-start // batch), -(-stop // batch)
        if first < last:
            with torch.no_grad():
                self.out[first:last] = self.attend(self.q[first:last], self.k, self.v)


def attend_later(
    attend: AttendRows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, LaterRows]:
    """An output that is empty until all its rows have been filled."""
    out = _AttendLater.apply(attend, q, k, v)
    # To autograd the output has always been what it will be: filling it is no change.
    return out, LaterRows(attend, q, k, v, out.data)


class _AttendLater(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, attend: AttendRows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        ctx.attend = attend
        ctx.save_for_backward(q, k, v)
        return q.new_empty(*q.shape[:2], q.shape[2] * q.shape[3])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.attend(*inputs)
        return None, *torch.autograd.grad(out, inputs, grad)
