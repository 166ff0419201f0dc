# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Classifier-free guidance inside training."""

from torch import Tensor


def guided_velocity(
    conditional: Tensor,
    unconditional: Tensor,
    guidance: float,
    detach_unconditional: bool = False,
) -> Tensor:
    """unconditional + guidance * (conditional - unconditional).

    Flow-GRPO detached the unconditional branch in its July 2025 tree and no longer did in
    November 2025, which is another objective; `detach_unconditional` chooses.
    """
    if detach_unconditional:
        unconditional = unconditional.detach()
    return unconditional + guidance * (conditional - unconditional)
