# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a rollout leaves behind for the update: the trained steps of one wave, as data."""

from dataclasses import dataclass, field

import torch

from megatron_leangrpo.conditioning.encoders import Conditioning
from megatron_leangrpo.diffusion.kernels import StepCoefficients
from megatron_leangrpo.diffusion.sampler import CHECKED
from megatron_leangrpo.grpo.placement import Wave
from megatron_leangrpo.operations.finite import check_steps


@dataclass
class TrainedStep:
    """One trained step of a wave, one row a trajectory; an `objective.RecordedStep`.

    Of a policy cut into pipeline stages the last one has all of it. On the others latents and
    velocities are empty, but for `x` on the first.
    """

    index: int
    """Position in the rollout, from 0."""
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
    reference_velocity: torch.Tensor | None = None
    """The reference's at the same latents, where there is a KL term."""


@dataclass
class Window:
    """Consecutive trained steps that share their backwards; a window of one step is the rule.

    The model is differentiated at the ends alone. jagg makes windows of more than two steps.
    """

    steps: list[TrainedStep]

    @property
    def ends(self) -> list[TrainedStep]:
        """The first and the last step, or the only one."""
        return [self.steps[0], self.steps[-1]] if len(self.steps) > 1 else self.steps[:1]


@dataclass
class WaveTrajectory:
    """The trained steps of one wave, in rollout order, and its final latents `[b, s, c]`."""

    wave: Wave
    conditioning: Conditioning
    windows: list[Window] = field(default_factory=list)
    latents: torch.Tensor | None = None
    finite: torch.Tensor | None = None
    """`Sampling.finite` of all steps, on every rank that shares the trajectory."""

    def check_finite(self, iteration: int) -> None:
        """Raise `NotFiniteError` with step, sample and tensor, in an iteration counted from 1.

        Speaks with no rank: those that share a trajectory see the same.
        """
        assert self.finite is not None
        samples = [f"prompt {slot.prompt_id} sample {slot.member}" for slot in self.wave.slots]
        where = f"iteration {iteration}'s rollout; no optimizer step was taken"
        check_steps(self.finite, CHECKED, samples, where)

    @property
    def steps(self) -> list[TrainedStep]:
        """The trained steps of all windows."""
        return [step for window in self.windows for step in window.steps]
