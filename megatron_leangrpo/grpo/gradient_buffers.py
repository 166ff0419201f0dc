# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The flat gradient buffers of megatron's data-parallel wrapper, as a whole."""

import torch

Flat = list[torch.Tensor]
"""One flat tensor for each of the wrapper's buffers, in its dtype (float32 or wider)."""


class GradientBuffers:
    """What backwards add to, with the few operations that a deferred weighting needs."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = [*model.buffers, *model.expert_parallel_buffers]

    @property
    def current(self) -> Flat:
        """The buffers themselves."""
        return [buffer.grad_data for buffer in self._buffers]

    def take(self) -> Flat:
        """Return a copy of the collected gradient and empty the buffers."""
        taken = [tensor.clone() for tensor in self.current]
        self.clear()
        return taken

    def clear(self) -> None:
        """Empty the buffers."""
        for tensor in self.current:
            tensor.zero_()

    def put(self, gradient: Flat | None) -> None:
        """Replace what was collected; None empties."""
        if gradient is None:
            self.clear()
            return
        for tensor, value in zip(self.current, gradient, strict=True):
            tensor.copy_(value)


def add_scaled(total: Flat | None, gradient: Flat, factor: float) -> Flat:
    """Return total + factor * gradient, in place where there is a total."""
    if total is None:
        return [tensor * factor for tensor in gradient]
    for tensor, value in zip(total, gradient, strict=True):
        tensor.add_(value, alpha=factor)
    return total
