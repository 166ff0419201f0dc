# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Full weights with the adapters in them, and what adapters change, a tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_leangrpo.models.common.conversion import TensorInfo, TensorSource
from megatron_leangrpo.models.common.lora_targets import A, B, LowRank


class WeightChanges(TensorSource):
    """`alpha / rank * B A` of every projection, under the name of its weight, in float32 or wider.

    `tensors` are A and B under PEFT's names.
    """

    def __init__(
        self, projections: Mapping[str, LowRank], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self._projections, self._tensors = projections, tensors
        self._layout = {
            f"{name}.weight": TensorInfo(
                (tensors[f"{name}.{B}"].shape[0], tensors[f"{name}.{A}"].shape[1]),
                _wide(tensors[f"{name}.{A}"].dtype),
            )
            for name in projections
        }

    @property
    def layout(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every change."""
        return self._layout

    def __getitem__(self, name: str) -> torch.Tensor:
        projection = name.removesuffix(".weight")
        dtype = self._layout[name].dtype
        a, b = (self._tensors[f"{projection}.{letter}"].to(dtype) for letter in (A, B))
        return self._projections[projection].scale * (b @ a)


class Merged(TensorSource):
    """Weights with the changes added, rounded to `dtype` or to that of each weight.

    ``ValueError`` where a change has no weight of its shape.
    """

    def __init__(
        self,
        weights: TensorSource,
        changes: WeightChanges,
        setting: str,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._weights, self._changes = weights, changes
        self._layout = {
            name: TensorInfo(info.shape, dtype or info.dtype)
            for name, info in weights.layout.items()
        }
        for name, info in changes.layout.items():
            found = weights.layout.get(name)
            if found is None or found.shape != info.shape:
                what = "is not there" if found is None else f"has shape {found.shape}"
                raise ValueError(f"{setting}: adapts {name} {info.shape}, which {what} in the base")

    @property
    def layout(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every weight."""
        return self._layout

    def __getitem__(self, name: str) -> torch.Tensor:
        weight, dtype = self._weights[name], self._layout[name].dtype
        if name not in self._changes.layout:
            return weight.to(dtype)
        change = self._changes[name]
        wide = torch.promote_types(weight.dtype, change.dtype)
        return (weight.to(wide) + change.to(wide)).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
