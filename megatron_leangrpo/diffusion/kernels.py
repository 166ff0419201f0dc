# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Stochastic steps of a flow-matching sampler, their log-probabilities and velocity gradients.

Every kernel is linear in the latent and the velocity:

    mean = coef_x * x + coef_v * v,    x_next = mean + std * noise

so a kernel is nothing but its coefficients. Latents are [b, ...] of any rank (packed FLUX tokens
[b, s, c], Wan video [b, c, f, h, w]); coefficients are per sample, so that a batch may mix steps,
and stochastic with deterministic samples. Arithmetic is in float32 or the widest input type,
whichever is wider. A log-prob is the mean over the elements of a sample, as every published trainer
has it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class StepCoefficients:
    """Coefficients of one step for each sample of a batch: float64 tensors [b], or [1] for all."""

    sigma: Tensor
    sigma_next: Tensor
    dt: Tensor
    """sigma_next - sigma, negative."""
    coef_x: Tensor
    coef_v: Tensor
    std: Tensor
    """Standard deviation of x_next given x; 0 where the step is deterministic."""
    amplitude: Tensor
    """Noise amplitude s per unit time (std = s * sqrt(-dt)); CPS has none and repeats std."""
    gaussian_log_prob: bool
    """False for CPS, whose published log-prob is -(x_next - mean)^2 without scale or normaliser."""

    def to(self, device: torch.device | str) -> "StepCoefficients":
        """The same coefficients on another device, moved in one copy."""
        names = [field.name for field in fields(self) if field.name != "gaussian_log_prob"]
        moved = torch.stack([getattr(self, name) for name in names]).to(device)
        return replace(self, **dict(zip(names, moved.unbind())))


def _flow_sde(level: float, sigma: Tensor, sigmas: Tensor) -> Tensor:
    # The published guard compares sigma == 1 literally and blows up just below 1; the minimum gives
    # the same value at 1 and stays bounded where a schedule starts slightly lower.
    return level * (sigma / (1 - torch.minimum(sigma, sigmas[1]))).sqrt()


def _dance_sde(level: float, sigma: Tensor, sigmas: Tensor) -> Tensor:
    return torch.full_like(sigma, level)


def _wan_sde(level: None, sigma: Tensor, sigmas: Tensor) -> Tensor:
    return sigmas[-1] + (sigmas[1] - sigmas[-1]) * sigma


_AMPLITUDES: dict[str, Callable[..., Tensor]] = {
    "flow_sde": _flow_sde,  # Flow-GRPO (SD3, FLUX, Qwen-Image), MixGRPO
    "dance_sde": _dance_sde,  # DanceGRPO
    "wan_sde": _wan_sde,  # Flow-GRPO's Wan script
}
KERNELS = (*_AMPLITUDES, "cps", "ode")


def check_kernel(kernel: str, level: float | None) -> None:
    """Raise ValueError unless `level` is a noise level that `kernel` can use."""
    if kernel not in KERNELS:
        raise ValueError(f"sampling.kernel={kernel!r}: must be one of {KERNELS}")
    if kernel in ("wan_sde", "ode"):
        if level is not None:
            raise ValueError(
                f"sampling.noise_level={level}: kernel {kernel} has no noise level; leave it null"
            )
        return
    if level is None or not (math.isfinite(level) and level > 0):
        raise ValueError(
            f"sampling.noise_level={level}: kernel {kernel} needs a positive number, such as 0.9"
        )
    if kernel == "cps" and level > 1:
        raise ValueError(
            f"sampling.noise_level={level}: kernel cps takes it as a share of a right angle, "
            "at most 1"
        )


def step_coefficients(
    kernel: str,
    level: float | None,
    sigmas: Tensor,
    steps: int | Sequence[int] | Tensor,
    stochastic: Tensor | Sequence[bool] | None = None,
) -> StepCoefficients:
    """Coefficients of the transitions sigmas[step] -> sigmas[step + 1].

    `steps` is one step index or one per sample; samples where `stochastic` [b] is False take the
    deterministic step `x + v * dt`.
    """
    check_kernel(kernel, level)
    sigmas = sigmas.double()
    index = torch.as_tensor(steps, device=sigmas.device).reshape(-1)
    sigma, sigma_next = sigmas[index], sigmas[index + 1]
    dt = sigma_next - sigma
    if kernel == "cps":
        amplitude = std = sigma_next * math.sin(level * math.pi / 2)
        kept = (sigma_next**2 - std**2).clamp(min=0).sqrt()
        coef_x = 1 - sigma_next + kept
        coef_v = kept * (1 - sigma) - (1 - sigma_next) * sigma
    elif kernel == "ode":
        amplitude = std = torch.zeros_like(sigma)
        coef_x, coef_v = torch.ones_like(sigma), dt
    else:
        amplitude = _AMPLITUDES[kernel](level, sigma, sigmas)
        std = amplitude * (-dt).sqrt()
        drift = amplitude**2 / (2 * sigma)
        coef_x = 1 + drift * dt
        coef_v = (1 + drift * (1 - sigma)) * dt

    values = [sigma, sigma_next, dt, coef_x, coef_v, std, amplitude]
    if stochastic is not None:
        mask = torch.as_tensor(stochastic, dtype=torch.bool, device=sigmas.device)
        coef_x = torch.where(mask, coef_x, 1.0)
        coef_v = torch.where(mask, coef_v, dt)
        std = torch.where(mask, std, 0.0)
        amplitude = torch.where(mask, amplitude, 0.0)
        values = torch.broadcast_tensors(sigma, sigma_next, dt, coef_x, coef_v, std, amplitude)
    return StepCoefficients(*values, gaussian_log_prob=kernel != "cps")


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float32, or the widest of the tensors' types where that is wider."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """[b] in the type and on the device of `like` [b, ...], shaped to broadcast against it."""
    return values.to(like).view(-1, *[1] * (like.dim() - 1))


def sample_mean(values: Tensor) -> Tensor:
    """Mean over all dimensions but the first."""
    return values.flatten(1).mean(1)


def transition_mean(x: Tensor, v: Tensor, c: StepCoefficients) -> Tensor:
    """Mean of x_next given x and the velocity."""
    dtype = compute_dtype(x, v)
    x, v = x.to(dtype), v.to(dtype)
    return per_sample(c.coef_x, x) * x + per_sample(c.coef_v, v) * v


def predicted_x0(x: Tensor, v: Tensor, c: StepCoefficients) -> Tensor:
    """Clean latent that the velocity points to."""
    dtype = compute_dtype(x, v)
    x, v = x.to(dtype), v.to(dtype)
    return x - per_sample(c.sigma, x) * v


def log_prob_of_mean(mean: Tensor, x_next: Tensor, c: StepCoefficients) -> Tensor:
    """Log-prob [b] of x_next under a transition mean; 0 with zero gradient where std is 0."""
    dtype = compute_dtype(mean, x_next)
    difference = x_next.detach().to(dtype) - mean.to(dtype)
    if c.gaussian_log_prob:
        # A deterministic sample gets std 1, so that neither its value nor its gradient is ever NaN.
        std = torch.where(c.std > 0, c.std, 1.0)
        normaliser = (std.log() + HALF_LOG_TWO_PI).to(difference)
        value = -0.5 * sample_mean((difference / per_sample(std, difference)) ** 2) - normaliser
    else:
        value = -sample_mean(difference**2)
    return torch.where(c.std.to(value.device) > 0, value, 0.0)


def log_prob(x: Tensor, v: Tensor, x_next: Tensor, c: StepCoefficients) -> Tensor:
    """Log-prob [b] of the stored x_next given x and the velocity.

    Rollout and replay score the same stored tensors with the same arithmetic, so that an unchanged
    velocity gives the same bits and a ratio of exactly 1.
    """
    return log_prob_of_mean(transition_mean(x, v, c), x_next, c)


@dataclass(frozen=True)
class Transition:
    """One drawn step: x_next in the type of x, the mean it was drawn around, its log-prob [b]."""

    x_next: Tensor
    mean: Tensor
    log_prob: Tensor


def draw_step(x: Tensor, v: Tensor, noise: Tensor | None, c: StepCoefficients) -> Transition:
    """Take a step with unit noise, which may be None if every sample is deterministic."""
    mean = transition_mean(x, v, c)
    x_next = mean
    if noise is not None:
        x_next = mean + per_sample(c.std, mean) * noise.to(mean)
    # Scored after rounding to the storage type: a replay sees only what is stored.
    x_next = x_next.detach().to(x.dtype)
    return Transition(x_next, mean, log_prob_of_mean(mean, x_next, c))


def log_prob_velocity_gradient(x: Tensor, v: Tensor, x_next: Tensor, c: StepCoefficients) -> Tensor:
    """d log_prob / d v in closed form, shaped like v; 0 where std is 0."""
    mean = transition_mean(x, v, c)
    difference = x_next.to(mean) - mean
    scale = 1 / torch.where(c.std > 0, c.std, 1.0) ** 2 if c.gaussian_log_prob else 2.0
    return _cotangent(c.coef_v * scale, difference, c)


def on_policy_velocity_gradient(noise: Tensor, c: StepCoefficients) -> Tensor:
    """d log_prob / d v at the drawn step itself, known from its unit noise before any reward."""
    noise = noise.to(compute_dtype(noise))
    scale = 1 / torch.where(c.std > 0, c.std, 1.0) if c.gaussian_log_prob else 2 * c.std
    return _cotangent(c.coef_v * scale, noise, c)


def _cotangent(scale: Tensor, direction: Tensor, c: StepCoefficients) -> Tensor:
    scale = torch.where(c.std > 0, scale, 0.0)
    return per_sample(scale, direction) * direction / direction[0].numel()
