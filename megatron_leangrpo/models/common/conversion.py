# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Full tensors that are read when they are asked for, and the same under other names.

A checkpoint larger than memory is converted a `Rule` at a time.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_leangrpo.models.common.weights import Rule, Tensors


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the numbers."""
        return self.num_elements * self.dtype.itemsize


class TensorSource(Mapping[str, torch.Tensor]):
    """Tensors by name on the CPU, each read when it is asked for."""

    @property
    @abstractmethod
    def layout(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor, in a good order to read them in."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)


class InMemory(TensorSource):
    """Tensors that have been read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._layout = {n: TensorInfo(tuple(t.shape), t.dtype) for n, t in tensors.items()}

    @property
    def layout(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        return self._layout

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class Renamed(TensorSource):
    """Tensors of another source under other names."""

    def __init__(self, source: TensorSource, stored_names: Mapping[str, str]) -> None:
        self._source, self._stored_names = source, stored_names
        self._layout = {name: source.layout[stored] for name, stored in stored_names.items()}

    @property
    def layout(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        return self._layout

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._source[self._stored_names[name]]


class Converted(TensorSource):
    """The other side of a table of rules: ours from theirs, or theirs from ours.

    What the last rule gave is kept, so that reading in the order of `layout` reads every tensor of
    the source once. The names of the source must be those of the rules.
    """

    def __init__(self, source: TensorSource, rules: Sequence[Rule], to_ours: bool) -> None:
        self._source, self._to_ours = source, to_ours
        self._rule_of = {name: rule for rule in rules for name in self._sides(rule)[1]}
        self._layout: dict[str, TensorInfo] = {}
        for rule in rules:
            inputs, outputs = self._sides(rule)
            infos = [source.layout[name] for name in inputs]
            if len({info.dtype for info in infos}) > 1:
                found = ", ".join(
                    f"{n} {i.dtype}".replace("torch.", "") for n, i in zip(inputs, infos)
                )
                raise ValueError(f"tensors that become one have several dtypes: {found}")
            meta = tuple(torch.empty(i.shape, dtype=i.dtype, device="meta") for i in infos)
            for name, tensor in zip(outputs, self._apply(rule, meta)):
                self._layout[name] = TensorInfo(tuple(tensor.shape), tensor.dtype)
        self._last: tuple[Rule | None, dict[str, torch.Tensor]] = (None, {})

    def _sides(self, rule: Rule) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (rule.theirs, rule.ours) if self._to_ours else (rule.ours, rule.theirs)

    def _apply(self, rule: Rule, tensors: Tensors) -> Tensors:
        return rule.to_ours(tensors) if self._to_ours else rule.to_theirs(tensors)

    @property
    def layout(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor, rule by rule."""
        return self._layout

    def __getitem__(self, name: str) -> torch.Tensor:
        rule = self._rule_of[name]
        if rule is not self._last[0]:
            inputs, outputs = self._sides(rule)
            self._last = (None, {})
            results = self._apply(rule, tuple(self._source[name] for name in inputs))
            self._last = (rule, dict(zip(outputs, results)))
        return self._last[1][name]
