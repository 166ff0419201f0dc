# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The policy as the rest of GRPO sees it: latents, timestep and conditioning in, velocity out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_leangrpo.conditioning.encoders import Conditioning

Velocity = Callable[[torch.Tensor, torch.Tensor, Conditioning], torch.Tensor]


@dataclass(frozen=True)
class Forward:
    """One of the transformer's forwards that a velocity is made of."""

    model: torch.nn.Module
    timestep: torch.Tensor
    """`[copies * b]`."""
    conditioning: Conditioning
    copies: int = 1
    """How often the latents stand in the batch."""
    with_gradient: bool = True


StepByStep = Callable[["Policy", Forward, torch.Tensor], torch.Tensor]
"""Runs a forward of a model whose stages are on several ranks, all of which have the latents."""


class Policy:
    """Calls the transformer in its own dtype and returns the velocity in float32 or wider.

    Shapes: x and velocity `[b, s, c]`, timestep `[b]` in [0, 1]. Whether the timestep is rounded is
    the model's own business: FLUX's is, Wan's is not. A model cut into stages needs `step_by_step`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        grid: tuple[int, ...],
        dtype: torch.dtype,
        step_by_step: StepByStep | None = None,
    ) -> None:
        self.model, self.grid, self.dtype = model, grid, dtype
        self.latent_dtype = torch.promote_types(dtype, torch.float32)
        self.step_by_step = step_by_step

    def __call__(
        self, x: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning
    ) -> torch.Tensor:
        forwards = self.forwards(timestep, conditioning)
        return self.combined([self._run(forward, x) for forward in forwards], timestep)

    def _run(self, forward: Forward, x: torch.Tensor) -> torch.Tensor:
        inputs = self.inputs(forward, x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and forward.with_gradient):
            if self.step_by_step is not None:
                return self.step_by_step(self, forward, inputs)
            return forward.model(inputs, forward.timestep, forward.conditioning, grid=self.grid)

    def forwards(self, timestep: torch.Tensor, conditioning: Conditioning) -> list[Forward]:
        """What has to run for a velocity."""
        return [Forward(self.model, timestep, conditioning)]

    def inputs(self, forward: Forward, x: torch.Tensor) -> torch.Tensor:
        """The latents as a forward takes them."""
        return (x if forward.copies == 1 else torch.cat([x] * forward.copies)).to(self.dtype)

    def combined(self, velocities: Sequence[torch.Tensor], timestep: torch.Tensor) -> torch.Tensor:
        """Make the velocity of what the forwards returned."""
        return velocities[0].to(self.latent_dtype)

    def over(self, model: torch.nn.Module) -> "Policy":
        """The same policy over another model of the same kind."""
        return Policy(model, self.grid, self.dtype, self.step_by_step)
