# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The policy as the rest of GRPO sees it: latents, timestep and conditioning in, velocity out."""

from collections.abc import Callable

import torch

from megatron_leangrpo.conditioning.encoders import Conditioning

Velocity = Callable[[torch.Tensor, torch.Tensor, Conditioning], torch.Tensor]


class Policy:
    """Calls the transformer in its own dtype and returns the velocity in float32 or wider.

    Shapes: x and velocity `[b, s, c]`, timestep `[b]` in [0, 1]. Whether the timestep is rounded is
    the model's own business: FLUX's is, Wan's is not.
    """

    def __init__(self, model: torch.nn.Module, grid: tuple[int, ...], dtype: torch.dtype) -> None:
        self.model, self.grid, self.dtype = model, grid, dtype
        self.latent_dtype = torch.promote_types(dtype, torch.float32)

    def __call__(
        self, x: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning
    ) -> torch.Tensor:
        velocity = self.model(x.to(self.dtype), timestep, conditioning, grid=self.grid)
        return velocity.to(self.latent_dtype)

    def over(self, model: torch.nn.Module) -> "Policy":
        """The same policy over another model of the same kind."""
        return Policy(model, self.grid, self.dtype)
