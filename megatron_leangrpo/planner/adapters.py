# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What linears with low-rank adapters on frozen weights keep for the backward."""

from dataclasses import dataclass

_PROJECTIONS = {"qkv": 3, "kv": 2}
"""Projections that are fused into one linear, each with an adapter of its own."""
_ROW_PARALLEL = ("out", "text out", "fc2")


@dataclass(frozen=True)
class Adapters:
    """Which linears of the blocks have adapters, and of what rank."""

    linears: frozenset[str]
    """Kind of block and linear, such as "double.qkv"; see `kinds`."""
    rank: int

    def ranks(self, linear: str) -> int:
        """Features between A and B, of all projections of a linear together; 0 without one."""
        if linear not in self.linears:
            return 0
        return self.rank * _PROJECTIONS.get(_role(linear), 1)

    def factors(self, linear: str, sizes: tuple[int, int], width: int) -> int:
        """Bytes of A and B as a forward multiplies with them, of `width` bytes a number.

        They are scaled, fused and rounded anew in every forward; only a float32 A of a row-parallel
        linear is the parameter itself.
        """
        features_in, features_out = sizes
        if _role(linear) in _ROW_PARALLEL and width >= 4:
            features_in = 0
        return self.ranks(linear) * (features_in + features_out) * width


def _role(linear: str) -> str:
    return linear.split(".")[-1]
