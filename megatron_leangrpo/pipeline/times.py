# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""How long a stage's operations take; in seconds, or in any other unit."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StageTimes:
    """One forward and one backward on each stage."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    latency: float = 0.0
    """From the end of an operation to the start of the next stage's."""

    @classmethod
    def even(cls, stages: int, ratio: float = 2.0, latency: float = 0.0) -> "StageTimes":
        """Equal stages whose forward takes 1 and whose backward takes `ratio`."""
        return cls((1.0,) * stages, (ratio,) * stages, latency)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    @property
    def both(self) -> tuple[float, ...]:
        """One forward and one backward together."""
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))

    @property
    def round_trip(self) -> float:
        """One item once around the ring."""
        return sum(self.forward) + self.stages * self.latency
