# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Whole collectives over rows, started at once and waited for later."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_leangrpo import platform


@dataclass(frozen=True)
class Started:
    """A collective on its way; nothing may write its input before the wait."""

    result: torch.Tensor
    source: torch.Tensor
    work: dist.Work

    def wait(self) -> torch.Tensor:
        """The result, for what follows on the current stream."""
        self.work.wait()
        return self.result


def all_gather(x: torch.Tensor, group: dist.ProcessGroup | None) -> Started:
    """Every rank's rows, in rank order."""
    x = x.contiguous()
    out = x.new_empty(platform.group_size(group) * x.shape[0], *x.shape[1:])
    return Started(out, x, dist.all_gather_into_tensor(out, x, group=group, async_op=True))


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup | None) -> Started:
    """Our share of the rows of the sum; they must divide by the group's size."""
    x = x.contiguous()
    out = x.new_empty(x.shape[0] // platform.group_size(group), *x.shape[1:])
    return Started(out, x, dist.reduce_scatter_tensor(out, x, group=group, async_op=True))


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None) -> Started:
    """The sum, in place if `x` is contiguous."""
    x = x.contiguous()
    return Started(x, x, dist.all_reduce(x, group=group, async_op=True))
