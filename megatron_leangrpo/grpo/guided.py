# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Classifier-free guidance around a policy, in rollout, update and evaluation alike."""

from dataclasses import dataclass, fields
from typing import Literal

import torch

from megatron_leangrpo.conditioning.encoders import Conditioning
from megatron_leangrpo.diffusion.guidance import guided_velocity
from megatron_leangrpo.grpo.policy import Policy
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
        super().__init__(policy.model, policy.grid, policy.dtype)
        self.guidance = guidance

    def __call__(
        self, x: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning
    ) -> torch.Tensor:
        guidance, forward = self.guidance, super().__call__
        scale = guidance.scale_at(timestep)
        if scale == 1:
            return forward(x, timestep, conditioning)
        negative = guidance.negative.select([0] * len(x))
        if guidance.forwards == "joint":
            both = joined(conditioning, negative)
            velocities = forward(torch.cat([x, x]), torch.cat([timestep, timestep]), both)
            conditional, unconditional = velocities.chunk(2)
        else:
            conditional = forward(x, timestep, conditioning)
            with torch.set_grad_enabled(torch.is_grad_enabled() and not guidance.detach):
                unconditional = forward(x, timestep, negative)
        return guided_velocity(conditional, unconditional, scale, guidance.detach)

    def over(self, model: torch.nn.Module) -> "GuidedPolicy":
        """The same policy over another model of the same kind."""
        return GuidedPolicy(super().over(model), self.guidance)


def joined(first: Conditioning, second: Conditioning) -> Conditioning:
    """The rows of both, one after the other."""

    def rows(name: str) -> torch.Tensor | None:
        parts = [getattr(first, name), getattr(second, name)]
        return None if parts[0] is None else torch.cat(parts)

    return Conditioning(**{field.name: rows(field.name) for field in fields(Conditioning)})
