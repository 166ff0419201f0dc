# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Two checkpoints of any format, tensor by tensor under diffusers' names."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_leangrpo.models.common.conversion import TensorSource

_BLOCK = 1 << 24


@dataclass
class Comparison:
    """How two checkpoints differ."""

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    """Tensors whose shapes differ, with both."""
    dtypes: list[str] = field(default_factory=list)
    """Tensors of other dtypes, with both; equal numbers are equal all the same."""
    values: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Largest difference and relative L2 of the tensors whose numbers differ."""
    compared: int = 0

    @property
    def equal(self) -> bool:
        """Whether both hold the same numbers under the same names."""
        return not (self.only_first or self.only_second or self.shapes or self.values)


class Comparable(Protocol):
    """Whole weights, or what adapters change."""

    @property
    def theirs(self) -> TensorSource:
        """Full tensors under diffusers' names."""


def compare(first: Comparable, second: Comparable) -> Comparison:
    """Compare all tensors, one at a time."""
    a, b = first.theirs, second.theirs
    result = Comparison(only_first=sorted(set(a) - set(b)), only_second=sorted(set(b) - set(a)))
    for name, info in a.layout.items():
        other = b.layout.get(name)
        if other is None:
            continue
        result.compared += 1
        if info.shape != other.shape:
            result.shapes.append(f"{name} {info.shape} and {other.shape}")
            continue
        if info.dtype != other.dtype:
            both = f"{info.dtype} and {other.dtype}".replace("torch.", "")
            result.dtypes.append(f"{name} {both}")
        difference = _difference(a[name], b[name])
        if difference is not None:
            result.values[name] = difference
    return result


def _difference(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float] | None:
    """Largest difference and relative L2, or None for equal ones; a NaN equals its own bits."""
    a, b = a.reshape(-1), b.reshape(-1)
    if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    largest, difference, size = 0.0, 0.0, 0.0
    # In blocks, because float64 is four times as large as bfloat16.
    for left, right in zip(a.split(_BLOCK), b.split(_BLOCK)):
        left, right = left.double(), right.double()
        gap = (left - right).abs()
        largest = max(largest, math.inf if gap.isnan().any() else gap.max().item())
        difference += gap.square().sum().item()
        size += right.square().sum().item()
    if largest == 0.0:
        return None
    relative = math.sqrt(difference / size) if size and math.isfinite(difference) else math.inf
    return largest, relative
