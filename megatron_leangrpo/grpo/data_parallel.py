# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's data-parallel wrapper, in whose buffers the gradient of an update collects."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.models.common.weights import unwrapped
from megatron_leangrpo.models.experts import Experts, idle_in_host, transformers_of


def wrap_data_parallel(
    model: torch.nn.Module,
    use_distributed_optimizer: bool,
    overlap_grad_reduce: bool = False,
    bucket_size: int | None = None,
) -> torch.nn.Module:
    """Wrap `model` so that gradients collect in contiguous float32 (or wider) buffers.

    Nothing is reduced during the backwards of an update; `reduce_gradients` does it once. For
    `EarlyReduction` make it with `overlap_grad_reduce`, in buckets of `bucket_size` numbers or
    megatron's size.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    def wrap(transformer: torch.nn.Module) -> torch.nn.Module:
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=use_distributed_optimizer,
            overlap_grad_reduce=overlap_grad_reduce,
            bucket_size=bucket_size,
            grad_reduce_in_fp32=transformer.config.params_dtype == torch.bfloat16,
        )
        return DistributedDataParallel(transformer.config, config, transformer)

    if isinstance(model, Experts):
        return DataParallelExperts(model, [wrap(expert) for expert in transformers_of(model)])
    return wrap(model)


class DataParallelExperts(torch.nn.Module):
    """Two experts, each in a wrapper with gradient buffers of its own.

    megatron's optimizer of one expert can then step without the other's.
    """

    def __init__(self, module: Experts, wrappers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.module = module
        self.wrappers = tuple(wrappers)

    @property
    def buffers(self) -> list[Any]:
        """The gradient buffers of both."""
        return [buffer for wrapper in self.wrappers for buffer in wrapper.buffers]

    @property
    def expert_parallel_buffers(self) -> list[Any]:
        """Those of megatron's experts, of which there are none in a diffusion transformer."""
        return []

    def zero_grad_buffer(self) -> None:
        """Empty the buffers of both."""
        for wrapper in self.wrappers:
            wrapper.zero_grad_buffer()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Reduce nothing while gradients collect."""
        with ExitStack() as stack:
            for wrapper in self.wrappers:
                stack.enter_context(wrapper.no_sync())
            yield


def wrappers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """megatron's wrappers, one a transformer, high noise first."""
    return list(model.wrappers) if isinstance(model, DataParallelExperts) else [model]


@contextmanager
def collecting_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Roll out and collect the gradient of an update, from nothing, in any number of backwards.

    Megatron's overlapped reduction counts the backwards of the first update and expects as many in
    every other; jagg has fewer once it has scores, and a replayed update more.
    """
    zero_gradients(model)
    with model.no_sync(), idle_in_host(unwrapped(model)):
        yield


def zero_gradients(model: torch.nn.Module) -> None:
    """Empty the gradient buffers."""
    model.zero_grad_buffer()
    # Without the distributed optimizer, megatron's step leaves the buffer in `grad`; the next
    # backward would accumulate there and the wrapper add it to the buffer once more.
    for parameter in model.parameters():
        parameter.grad = None


def reduce_gradients(model: torch.nn.Module, whole: bool = False) -> None:
    """Sum gradients over data-parallel ranks, then over tensor-parallel ranks where due; once.

    With the distributed optimizer a rank ends with the sum of its own shard only, unless `whole`.
    """
    from megatron.core.distributed import finalize_model_grads

    with platform.host_mode():
        finalize_model_grads(wrappers_of(model), force_all_reduce=whole)
