# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The flat gradient buffers of megatron's data-parallel wrapper, and copies of the same shape."""

import torch
import torch.distributed as dist

from megatron_leangrpo import platform

Flat = list[torch.Tensor]
"""One flat tensor for each of the wrapper's buffers, in its dtype (float32 or wider)."""


class GradientBuffers:
    """What backwards add to, with the few operations that a deferred weighting needs.

    Copies are kept for the next use: they are as large as the model, and an allocator that sees
    them come and go between activations ends up fragmented.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = [*model.buffers, *model.expert_parallel_buffers]
        self._free: list[Flat] = []
        self._copies = 0

    @property
    def current(self) -> Flat:
        """The buffers themselves."""
        return [buffer.grad_data for buffer in self._buffers]

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers themselves."""
        return sum(tensor.nbytes for tensor in self.current)

    @property
    def copies_num_bytes(self) -> int:
        """Bytes of all copies that were ever needed at once."""
        return self._copies * self.num_bytes

    def take(self) -> Flat:
        """Move the collected gradient into a copy and empty the buffers."""
        taken = self.add_scaled(None, self.current, 1.0)
        self.clear()
        return taken

    def clear(self) -> None:
        """Empty the buffers."""
        for tensor in self.current:
            tensor.zero_()

    def put(self, gradient: Flat | None) -> None:
        """Replace what was collected by a copy, which is given back; None empties."""
        if gradient is None:
            self.clear()
            return
        for tensor, value in zip(self.current, gradient, strict=True):
            tensor.copy_(value)
        self.release(gradient)

    def add_scaled(self, total: Flat | None, gradient: Flat, factor: float) -> Flat:
        """Return total + factor * gradient, in place where there is a total."""
        if total is None:
            total = self._new()
            for tensor, value in zip(total, gradient, strict=True):
                torch.mul(value, factor, out=tensor)
            return total
        for tensor, value in zip(total, gradient, strict=True):
            tensor.add_(value, alpha=factor)
        return total

    def release(self, copy: Flat | None) -> None:
        """Take back a copy that nobody reads any more."""
        if copy is not None:
            self._free.append(copy)

    def inner_product(self, first: Flat, second: Flat) -> float:
        """Inner product over the parameters of all tensor-parallel ranks (a collective)."""
        total = torch.zeros((), dtype=torch.float64, device=platform.device())
        for buffer, one, other in zip(self._buffers, first, second, strict=True):
            for parameter, (start, end, *_) in buffer.param_index_map.items():
                product = torch.dot(one[start:end].double(), other[start:end].double())
                # Every rank has all of a parameter that is not sharded.
                is_sharded = getattr(parameter, "tensor_model_parallel", False)
                total += product if is_sharded else product / platform.tp_size()
        dist.all_reduce(total, group=platform.tp_group())
        return total.item()

    def _new(self) -> Flat:
        if self._free:
            return self._free.pop()
        self._copies += 1
        return [torch.empty_like(tensor) for tensor in self.current]
