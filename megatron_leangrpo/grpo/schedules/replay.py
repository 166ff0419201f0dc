# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Replay: roll out without graphs, then run every trained step again with gradients.

What DanceGRPO and Flow-GRPO do, and the only schedule that is right off-policy.
"""

import torch

from megatron_leangrpo.grpo.schedules.base import DeferredSchedule
from megatron_leangrpo.grpo.trajectory import WaveTrajectory, Window


class ReplaySchedule(DeferredSchedule):
    """N + 3T forward-equivalents a sample; one step's activations at a time."""

    name = "replay"
    keeps_graph = False

    def velocities(self, trajectory: WaveTrajectory, window: Window) -> list[torch.Tensor]:
        """Run the forwards of the window's ends again, now with gradients."""
        return self._replayed(trajectory, window)
