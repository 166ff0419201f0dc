# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Classifier-free guidance around a policy, in rollout, update and evaluation alike."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch

from megatron_leangrpo.conditioning.encoders import Conditioning
from megatron_leangrpo.diffusion.guidance import guided_velocity
from megatron_leangrpo.grpo.policy import Forward, Policy
from megatron_leangrpo.models.experts import runs_high


@dataclass(frozen=True)
class Guidance:
    """How strongly a prompt counts against the negative one, and how that is computed."""

    negative: Conditioning
    """Of the negative prompt, one row."""
    scale: float
    low_noise_scale: float
    """Scale below the experts' boundary."""
    boundary: float | None
    """None for a model of one transformer."""
    forwards: Literal["joint", "separate"]
    detach: bool
    """No gradient flows through the negative prompt's velocity."""

    def scale_at(self, timestep: torch.Tensor) -> float:
        """The scale of a batch, all of whose rows belong to one expert."""
        if self.boundary is None or runs_high(timestep, self.boundary):
            return self.scale
        return self.low_noise_scale


class GuidedPolicy(Policy):
    """negative + scale * (conditional - negative); two forwards' work wherever scale is not 1."""

    def __init__(self, policy: Policy, guidance: Guidance) -> None:
        super().__init__(policy.model, policy.grid, policy.dtype, policy.step_by_step)
        self.guidance = guidance

    def forwards(self, timestep: torch.Tensor, conditioning: Conditioning) -> list[Forward]:
        """One doubled batch or two forwards."""
        (conditional,) = super().forwards(timestep, conditioning)
        if self.guidance.scale_at(timestep) == 1:
            return [conditional]
        negative = self.guidance.negative.select([0] * len(timestep))
        if self.guidance.forwards == "joint":
            both = joined(conditioning, negative)
            return [Forward(self.model, torch.cat([timestep, timestep]), both, copies=2)]
        has_gradient = not self.guidance.detach
        return [
            conditional,
            Forward(self.model, timestep, negative, with_gradient=has_gradient),
        ]

    def combined(self, velocities: Sequence[torch.Tensor], timestep: torch.Tensor) -> torch.Tensor:
        """Guide the prompt's velocity away from the negative one's."""
        scale = self.guidance.scale_at(timestep)
        if scale == 1:
            return super().combined(velocities, timestep)
        if self.guidance.forwards == "joint":
            velocities = velocities[0].chunk(2)
        conditional, unconditional = (v.to(self.latent_dtype) for v in velocities)
        return guided_velocity(conditional, unconditional, scale, self.guidance.detach)

    def over(self, model: torch.nn.Module) -> "GuidedPolicy":
        """The same policy over another model of the same kind."""
        return GuidedPolicy(super().over(model), self.guidance)


def joined(first: Conditioning, second: Conditioning) -> Conditioning:
    """The rows of both, one after the other."""

    def rows(name: str) -> torch.Tensor | None:
        parts = [getattr(first, name), getattr(second, name)]
        return None if parts[0] is None else torch.cat(parts)

    return Conditioning(**{field.name: rows(field.name) for field in fields(Conditioning)})
