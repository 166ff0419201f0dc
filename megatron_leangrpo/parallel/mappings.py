# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Collectives of the tensor-parallel region as autograd operations.

The two all-reduces are our own: megatron-core before 0.19 reduces a contiguous *copy* of a
non-contiguous tensor and returns the tensor itself, unreduced. The gathers and scatters are
megatron's.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings as megatron_mappings


def _all_reduced(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over `group` in a new tensor; megatron's works in place and changes its input."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduced(grad, ctx.group), None


class _ReduceFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _is_alone(group: dist.ProcessGroup | None) -> bool:
    return group is None or group.size() == 1


def copy_to_tensor_parallel(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Identity; the gradient is summed over the group.

    For a replicated tensor that each rank uses for its own share of the work.
    """
    return x if _is_alone(group) else _CopyToTensorParallel.apply(x, group)


def reduce_from_tensor_parallel(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum over the group; the gradient is passed on as it is.

    For partial sums whose total every rank then uses in the same way. Where each rank goes on with
    its own share of the work, follow it with `copy_to_tensor_parallel`.
    """
    return x if _is_alone(group) else _ReduceFromTensorParallel.apply(x, group)


def reduce_partial_sums(
    x: torch.Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool
) -> torch.Tensor:
    """Sum the row-parallel products `[s, b, h]`, and under sequence parallelism keep our tokens."""
    if _is_alone(group):
        return x
    if sequence_parallel:
        return megatron_mappings.reduce_scatter_to_sequence_parallel_region(x, group=group)
    return reduce_from_tensor_parallel(x, group)


def enter_tensor_parallel(
    x: torch.Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool
) -> torch.Tensor:
    """All tokens `[s, b, h]` for column-parallel products; their gradient is summed over ranks."""
    if _is_alone(group):
        return x
    if sequence_parallel:
        return megatron_mappings.gather_from_sequence_parallel_region(x, group=group)
    return copy_to_tensor_parallel(x, group)


def scatter_tokens(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Our share of the replicated tokens `[s, b, h]`; s must divide by the group's size."""
    if _is_alone(group):
        return x
    return megatron_mappings.scatter_to_sequence_parallel_region(x, group=group)


def gather_tokens(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All tokens from every rank's share, where the same loss is then computed on every rank.

    megatron's default backward would add the equal gradients of the ranks: all upstream gradients
    would be too large by the group's size.
    """
    if _is_alone(group):
        return x
    return megatron_mappings.gather_from_sequence_parallel_region(
        x, tensor_parallel_output_grad=False, group=group
    )


def gather_features(
    x: torch.Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool
) -> torch.Tensor:
    """The whole last dimension from every rank's slice of it.

    Under sequence parallelism each rank applies the result to its own tokens, so the gradients are
    summed on the way back; without, they are equal on all ranks and each keeps its slice.
    """
    if _is_alone(group):
        return x
    if sequence_parallel:
        return megatron_mappings.all_gather_last_dim_from_tensor_parallel_region(x, group=group)
    return megatron_mappings.gather_from_tensor_model_parallel_region(x, group=group)
