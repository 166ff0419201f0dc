# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Retain: keep the graphs that the rollout built and run their backwards once rewards are known."""

import torch

from megatron_leangrpo.grpo.schedules.base import DeferredSchedule
from megatron_leangrpo.grpo.trajectory import TrainedStep, WaveTrajectory


class RetainSchedule(DeferredSchedule):
    """N + 2T forward-equivalents a sample; T steps' activations of every trajectory in flight."""

    name = "retain"
    keeps_graph = True

    def velocity(self, trajectory: WaveTrajectory, step: TrainedStep) -> torch.Tensor:
        """Return the rollout's own velocity, graph attached."""
        return step.velocity
