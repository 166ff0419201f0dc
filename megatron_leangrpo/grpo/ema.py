# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Exponential moving average of the weights, by Flow-GRPO's rule (`flow_grpo/ema.py`)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def ema_decay(updates: int, cap: float) -> float:
    """Return min((1 + n) / (10 + n), cap) after n updates."""
    return min((1 + updates) / (10 + updates), cap)


class WeightAverage:
    """A float32 (or wider) average of a rank's own weights, updated every `interval` updates."""

    def __init__(self, model: torch.nn.Module, cap: float, interval: int) -> None:
        if not 0 < cap < 1:
            raise ValueError(f"optimizer.ema_decay = {cap} must be between 0 and 1 (0 keeps none)")
        if interval < 1:
            raise ValueError(f"optimizer.ema_interval = {interval} must be at least 1")
        self.cap, self.interval = cap, interval
        self.values = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in _trained(model)
        }

    @torch.no_grad()
    def update(self, model: torch.nn.Module, updates: int) -> None:
        """Fold in the weights after update number `updates` (from 0), if the interval says so."""
        if (updates + 1) % self.interval:
            return
        decay = ema_decay(updates, self.cap)
        for name, parameter in _trained(model):
            value = self.values[name]
            value.lerp_(parameter.detach().to(value.dtype), 1 - decay)

    @contextmanager
    def applied(self, model: torch.nn.Module) -> Iterator[None]:
        """Put the average in place of the live weights for the time of the context."""
        live = {name: p.detach().clone() for name, p in _trained(model)}
        try:
            self._copy_into(model, self.values)
            yield
        finally:
            self._copy_into(model, live)

    @torch.no_grad()
    def _copy_into(self, model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
        for name, parameter in _trained(model):
            parameter.copy_(values[name])


def _trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
