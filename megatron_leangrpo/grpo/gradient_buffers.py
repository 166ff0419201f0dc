# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The flat gradient buffers of megatron's data-parallel wrapper, and copies of the same shape."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_leangrpo import platform

Flat = list[torch.Tensor]
"""One flat tensor for each of the wrapper's buffers, in its dtype (float32 or wider)."""


class GradientBuffers:
    """What backwards add to, with the few operations that a deferred weighting needs.

    A backward adds to the wrapper's own buffers, which are what is reduced, or to a copy. Copies
    are kept for the next use: they are as large as the model, and an allocator that sees them come
    and go between activations ends up fragmented.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = [*model.buffers, *model.expert_parallel_buffers]
        self.own: Flat = [buffer.grad_data for buffer in self._buffers]
        """The wrapper's own buffers."""
        self._current = self.own
        self._copies: list[Flat] = []
        self._free: list[Flat] = []
        self._views: dict[int, list[tuple[torch.nn.Parameter, torch.Tensor]]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the wrapper's own buffers."""
        return sum(tensor.nbytes for tensor in self.own)

    @property
    def copies_num_bytes(self) -> int:
        """Bytes of all copies that were ever needed at once."""
        return len(self._copies) * self.num_bytes

    def reset(self) -> None:
        """Take all copies back, whoever had them; the wrapper's own buffers are not lent."""
        self._free = list(self._copies)
        self.collect_in(self.own)

    def empty(self) -> Flat:
        """Lend a tensor of zeros."""
        flat = self._lend()
        for tensor in flat:
            tensor.zero_()
        return flat

    def release(self, flat: Flat | None) -> None:
        """Take back what nobody reads any more; the wrapper's own buffers may be lent too."""
        if flat is not None:
            self._free.append(flat)

    @contextmanager
    def collecting_in(self, flat: Flat) -> Iterator[None]:
        """Let the backwards in this context add to `flat`."""
        before = self._current
        self.collect_in(flat)
        try:
            yield
        finally:
            self.collect_in(before)

    def collect_in(self, flat: Flat) -> None:
        """Let backwards add to `flat` from here on."""
        if flat is self._current:
            return
        self._current = flat
        for parameter, view in self._views_of(flat):
            parameter.main_grad = view

    def _views_of(self, flat: Flat) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        # Copies are never given up, so that an id stays theirs.
        if id(flat) not in self._views:
            self._views[id(flat)] = [
                (parameter, tensor[start:end].view(parameter.shape))
                for buffer, tensor in zip(self._buffers, flat, strict=True)
                for parameter, (start, end, *_) in buffer.param_index_map.items()
            ]
        return self._views[id(flat)]

    def take(self) -> Flat:
        """Move what the wrapper's own buffers have collected into a copy."""
        taken = self.add_scaled(None, self.own, 1.0)
        for tensor in self.own:
            tensor.zero_()
        return taken

    def put(self, gradient: Flat | None) -> None:
        """Leave a gradient, or none, in the wrapper's own buffers, which are lent no longer."""
        if gradient is not self.own:
            for i, tensor in enumerate(self.own):
                if gradient is None:
                    tensor.zero_()
                else:
                    tensor.copy_(gradient[i])
            self.release(gradient)
        self._free = [flat for flat in self._free if flat is not self.own]

    def add_scaled(self, total: Flat | None, gradient: Flat, factor: float) -> Flat:
        """Return total + factor * gradient, in place where there is a total."""
        if total is None:
            total = self._lend()
            for tensor, value in zip(total, gradient, strict=True):
                torch.mul(value, factor, out=tensor)
            return total
        for tensor, value in zip(total, gradient, strict=True):
            tensor.add_(value, alpha=factor)
        return total

    def inner_product(self, first: Flat, second: Flat) -> float:
        """Inner product over the parameters of all ranks that hold the model (a collective)."""
        total = torch.zeros((), dtype=torch.float64, device=platform.device())
        for buffer, one, other in zip(self._buffers, first, second, strict=True):
            for parameter, (start, end, *_) in buffer.param_index_map.items():
                product = torch.dot(one[start:end].double(), other[start:end].double())
                # Every rank has all of a parameter that is not sharded.
                is_sharded = getattr(parameter, "tensor_model_parallel", False)
                total += product if is_sharded else product / platform.tp_size()
        for group in (platform.tp_group(), platform.pp_group()):
            dist.all_reduce(total, group=group)
        return total.item()

    def _lend(self) -> Flat:
        if self._free:
            return self._free.pop()
        self._copies.append([torch.empty_like(tensor) for tensor in self.own])
        return self._copies[-1]
