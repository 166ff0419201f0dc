# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What linears in FP8 keep of their inputs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Packing:
    """How linears in FP8 keep their inputs for the backward: a byte a number, and scales."""

    block: int | None
    """Numbers of a row that share a scale; None: all numbers do."""
    scale: int
    """Bytes of a scale."""
    ends: int = 0
    """Blocks at either end of the model that are not in FP8."""

    def row(self, features: int, alone: bool) -> int:
        """Bytes of a row; `alone` on one rank, where a scale of all numbers is kept once."""
        if self.block is None:
            return features if alone else features + self.scale
        return features + self.scale * -(-features // self.block)
