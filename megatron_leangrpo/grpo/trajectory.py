# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a rollout leaves behind for the update: the trained steps of one wave, as data."""

from dataclasses import dataclass, field

import torch

from megatron_leangrpo.conditioning.encoders import Conditioning
from megatron_leangrpo.diffusion.kernels import StepCoefficients
from megatron_leangrpo.grpo.placement import Wave


@dataclass
class TrainedStep:
    """One trained step of a wave, one row a trajectory; an `objective.RecordedStep`."""

    timestep: torch.Tensor
    """`[b]`, what the model was given."""
    coefficients: StepCoefficients
    x: torch.Tensor
    x_next: torch.Tensor
    old_log_prob: torch.Tensor
    trained: torch.Tensor
    """`[b]` bool: which trajectories train this step; the others have weight 0."""
    velocity: torch.Tensor
    """The rollout's velocity `[b, s, c]`; carries its graph where the schedule kept one."""


@dataclass
class WaveTrajectory:
    """The trained steps of one wave, in rollout order, and its final latents `[b, s, c]`."""

    wave: Wave
    conditioning: Conditioning
    steps: list[TrainedStep] = field(default_factory=list)
    latents: torch.Tensor | None = None
