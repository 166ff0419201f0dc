# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Sigma schedules: the noise levels of a trajectory and the timesteps given to the model."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SIGMA_SCHEDULES = ("flux_dynamic", "static_shift", "unipc_flow")


@dataclass(frozen=True)
class SigmaSchedule:
    """Noise levels of N steps and what the model is told about them."""

    sigmas: Tensor
    """[N + 1], float64, strictly decreasing, ends in 0."""
    timesteps: Tensor
    """[N], float64, in [0, 1]; stored because a truncated timestep cannot be recomputed from a
    sigma in another precision."""

    @property
    def num_steps(self) -> int:
        """N, the number of model evaluations."""
        return self.timesteps.numel()

    def first_below(self, boundary: float | None) -> int | None:
        """The first step whose timestep is below a boundary; N where all are above it."""
        return None if boundary is None else int((self.timesteps >= boundary).sum())


def flux_mu(image_tokens: int) -> float:
    """Exponent of FLUX's dynamic shift, linear in image tokens: 0.5 at 256, 1.15 at 4096."""
    slope = (1.15 - 0.5) / (4096 - 256)
    return 0.5 + slope * (image_tokens - 256)


def _static_shift(shift: float, num_steps: int, dtype: torch.dtype) -> Tensor:
    t = torch.linspace(1, 0, num_steps + 1, dtype=dtype)
    return shift * t / (1 + (shift - 1) * t)


def _flux_dynamic(image_tokens: int, num_steps: int) -> Tensor:
    t = torch.linspace(1, 1 / num_steps, num_steps, dtype=torch.float64)
    exp_mu = math.exp(flux_mu(image_tokens))
    return torch.cat([exp_mu / (exp_mu + 1 / t - 1), torch.zeros(1, dtype=torch.float64)])


def _unipc_flow(shift: float, num_steps: int) -> Tensor:
    t = 1 - torch.linspace(1, 1 / 1000, num_steps + 1, dtype=torch.float64)
    shifted = (shift * t / (1 + (shift - 1) * t)).flip(0)[:-1]
    return torch.cat([shifted, torch.zeros(1, dtype=torch.float64)])


def build_sigma_schedule(
    name: str,
    num_steps: int,
    image_tokens: int | None = None,
    shift: float | None = None,
    truncate_timesteps: bool = False,
) -> SigmaSchedule:
    """Build a schedule by name.

    `flux_dynamic` needs `image_tokens` (diffusers' FLUX scheduler); `static_shift` (DanceGRPO,
    MixGRPO) and `unipc_flow` (Wan in Flow-GRPO) need `shift`. `unipc_flow` is diffusers' UniPC as
    Flow-GRPO used it; diffusers 0.42 spaces it differently and starts at 1 - 1e-6.

    `truncate_timesteps` gives the model int(1000 * sigma) / 1000 as DanceGRPO does. Its schedule is
    float32, and float64 truncates to another integer at some steps (shift 3, N 20, step 18: 250 and
    249), so a static shift is truncated in float32 here too. UniPC's timesteps are integers always,
    truncated in float64 as diffusers does.
    """
    if name not in SIGMA_SCHEDULES:
        raise ValueError(f"sampling.sigma_schedule={name!r}: must be one of {SIGMA_SCHEDULES}")
    if num_steps < 1:
        raise ValueError(f"sampling.num_steps={num_steps}: must be at least 1")
    if name == "flux_dynamic":
        if image_tokens is None or image_tokens < 1:
            raise ValueError(f"image_tokens={image_tokens}: flux_dynamic needs the image tokens")
        if shift is not None:
            raise ValueError(
                f"sampling.shift={shift}: flux_dynamic computes its shift from the image tokens; "
                "leave it unset"
            )
        sigmas = _flux_dynamic(image_tokens, num_steps)
        truncation_source = sigmas.float()
    else:
        if shift is None or not (math.isfinite(shift) and shift > 0):
            raise ValueError(f"sampling.shift={shift}: {name} needs a positive number, such as 3.0")
        if name == "static_shift":
            sigmas = _static_shift(shift, num_steps, torch.float64)
            truncation_source = _static_shift(shift, num_steps, torch.float32)
        else:
            sigmas = truncation_source = _unipc_flow(shift, num_steps)
    assert bool((sigmas.diff() < 0).all()), "sigmas must be strictly decreasing"

    timesteps = sigmas[:-1].clone()
    if truncate_timesteps or name == "unipc_flow":
        timesteps = (truncation_source[:-1] * 1000).to(torch.int64).double() / 1000
    return SigmaSchedule(sigmas=sigmas, timesteps=timesteps)
