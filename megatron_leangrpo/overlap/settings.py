# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a run says about overlapping collectives with products."""

from dataclasses import dataclass

from megatron_leangrpo.overlap.cost_model import Flash
from megatron_leangrpo.overlap.schedule import PATTERNS

MODES = ("off", "bulk", "flash", "auto")


@dataclass(frozen=True)
class OverlapSettings:
    """How the collectives of the linear layers and around attention run."""

    mode: str = "off"
    """off: megatron's own linears; bulk: whole collectives beside whole products, in the backward
    only; flash: slices travel beside products, forward and backward; auto: bulk or flash, whichever
    the cost model finds faster for a layer and its tokens."""
    pattern: str = "ring"
    """ring talks to neighbours (PCIe, several nodes); direct straight to the owner, and sums in
    float32."""
    sub_slices: int = 2
    """Parts a rank's slice is cut into, and groups of its heads around attention; from 2 on a ring
    adds in the products themselves."""
    calibration: str | None = None
    """auto: the file of `leangrpo overlap measure --calibrate`."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"overlap.mode is {self.mode!r}; valid values: {', '.join(MODES)}")
        if self.pattern not in PATTERNS:
            raise ValueError(
                f"overlap.pattern is {self.pattern!r}; valid values: {', '.join(PATTERNS)}"
            )
        if not 1 <= self.sub_slices <= 16:
            raise ValueError(f"overlap.sub_slices is {self.sub_slices}; it must be from 1 to 16")
        if self.mode == "auto" and self.calibration is None:
            raise ValueError(
                "overlap.mode is auto, which needs overlap.calibration: the file that "
                "leangrpo overlap measure --calibrate FILE writes on this machine"
            )

    @property
    def flash(self) -> Flash | None:
        """How collectives are cut; None where they are not."""
        if self.mode != "flash":
            return None
        return Flash(
            pattern=self.pattern,
            sub_slices=self.sub_slices,
            in_product=self.pattern == "ring" and self.sub_slices > 1,
        )
