# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The clipped policy objective: from the velocity of a step to its loss, for every schedule."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_leangrpo.diffusion.kernels import (
    StepCoefficients,
    compute_dtype,
    log_prob_of_mean,
    sample_mean,
    transition_mean,
)

RATIO_NORMS = ("none", "grpo_guard", "flow_factory")
KL_FORMS = ("flow_grpo", "exact", "mean_mse", "velocity_mse")

StepStats = dict[str, Tensor]
"""Detached statistics [b] of one step: ratio, approx_kl, clip_fraction, clip_fraction_high,
clip_fraction_low, policy_loss, and kl where there is a KL term."""


@dataclass(frozen=True)
class Objective:
    """What is minimised, per sample and trained step."""

    clip_range: float = 1e-4
    """The ratio is clipped to [1 - clip_range, 1 + clip_range]."""
    adv_clip: float | None = 5.0
    """Advantages are clipped to this magnitude; None leaves them."""
    ratio_norm: str = "none"
    """grpo_guard takes the quadratic term out of the log-ratio, scales the rest by std and divides
    the loss by -dt; flow_factory has the same ratio without that division."""
    kl_beta: float = 0.0
    """Weight of the KL term to the reference model."""
    kl_form: str = "flow_grpo"
    """exact: squared distance of the means over 2 std^2; flow_grpo: over 2 s^2, without dt;
    mean_mse and velocity_mse (Flow-Factory): no denominator."""

    def __post_init__(self) -> None:
        if not 0 < self.clip_range < 1:
            raise ValueError(f"grpo.clip_range={self.clip_range}: must be between 0 and 1")
        if self.adv_clip is not None and not self.adv_clip > 0:
            raise ValueError(f"grpo.adv_clip={self.adv_clip}: must be positive")
        if self.ratio_norm not in RATIO_NORMS:
            raise ValueError(f"grpo.ratio_norm={self.ratio_norm!r}: must be one of {RATIO_NORMS}")
        if not 0 <= self.kl_beta < math.inf:
            raise ValueError(f"grpo.kl_beta={self.kl_beta}: must be 0 or more")
        if self.kl_form not in KL_FORMS:
            raise ValueError(f"grpo.kl_form={self.kl_form!r}: must be one of {KL_FORMS}")

    def check_kernel(self, kernel: str) -> None:
        """Raise ValueError if the objective is not defined for a sampling kernel."""
        if self.ratio_norm != "none" and kernel == "cps":
            raise ValueError(
                f"grpo.ratio_norm={self.ratio_norm!r}: normalises a Gaussian log-ratio, which "
                "sampling.kernel=cps does not have; use none, or another kernel"
            )


class RecordedStep(Protocol):
    """Transitions of b samples as the rollout left them, not necessarily of the same step."""

    x: Tensor
    x_next: Tensor
    old_log_prob: Tensor
    coefficients: StepCoefficients
    velocity: Tensor
    """The rollout's velocity; read only where the ratio is normalised."""
    trained: Tensor
    """[b] bool; a sample outside it has exactly no loss and no gradient."""


def _surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_range: float, adv_clip: float | None
) -> tuple[Tensor, Tensor]:
    if adv_clip is not None:
        advantages = advantages.clamp(-adv_clip, adv_clip)
    advantages = advantages.to(log_ratio)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped), ratio


def _statistics(
    log_ratio: Tensor, ratio: Tensor, policy_loss: Tensor, clip_range: float
) -> StepStats:
    log_ratio, ratio = log_ratio.detach().double(), ratio.detach().double()
    high, low = (ratio - 1 > clip_range).double(), (1 - ratio > clip_range).double()
    return {
        "ratio": ratio,
        "approx_kl": 0.5 * log_ratio**2,
        "clip_fraction": high + low,
        "clip_fraction_high": high,
        "clip_fraction_low": low,
        "policy_loss": policy_loss.detach().double(),
    }


def clipped_policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    clip_range: float,
    adv_clip: float | None = None,
) -> tuple[Tensor, StepStats]:
    """PPO's max(-A r, -A clip(r)) of each sample [b], with statistics."""
    log_ratio = log_prob - old_log_prob
    loss, ratio = _surrogate(log_ratio, advantages, clip_range, adv_clip)
    return loss, _statistics(log_ratio, ratio, loss, clip_range)


def normalised_log_ratio(
    log_ratio: Tensor, mean: Tensor, old_mean: Tensor, c: StepCoefficients
) -> Tensor:
    """GRPO-Guard's log-ratio [b]: the mean over elements of noise * (mean - old_mean).

    (log_ratio + ||mean - old_mean||^2 / (2 std^2)) * std takes the quadratic term out of the
    Gaussian log-ratio; 0 where std is 0. Coefficients are per sample where the published code has
    batch means.
    """
    std = torch.where(c.std > 0, c.std, 1.0).to(log_ratio)
    squared_distance = sample_mean((mean - old_mean.detach().to(mean)) ** 2)
    value = log_ratio * std + squared_distance / (2 * std)
    return torch.where(c.std.to(value.device) > 0, value, 0.0)


def reference_kl(
    form: str, velocity: Tensor, reference_velocity: Tensor, c: StepCoefficients
) -> Tensor:
    """KL term [b] to the reference model at the same latent, by its published form.

    The means differ by coef_v * (velocity - reference_velocity). The forms with a denominator are 0
    where a step is deterministic.
    """
    dtype = compute_dtype(velocity, reference_velocity)
    difference = velocity.to(dtype) - reference_velocity.detach().to(dtype)
    velocity_mse = sample_mean(difference**2)
    if form == "velocity_mse":
        return velocity_mse
    mean_mse = (c.coef_v**2).to(velocity_mse) * velocity_mse
    if form == "mean_mse":
        return mean_mse
    scale = c.std if form == "exact" else c.amplitude
    return mean_mse / (2 * torch.where(scale > 0, scale, math.inf) ** 2).to(mean_mse)


def step_loss(
    velocity: Tensor,
    step: RecordedStep,
    advantages: Tensor,
    objective: Objective,
    reference_velocity: Tensor | None = None,
) -> tuple[Tensor, StepStats]:
    """Loss [b] of each sample at its step, from a velocity kept since the rollout or replayed.

    The caller sums it and divides by samples and trained steps; `advantages` [b] are unclipped.
    """
    c = step.coefficients
    mean = transition_mean(step.x, velocity, c)
    log_ratio = log_prob_of_mean(mean, step.x_next, c) - step.old_log_prob
    # Taken out before exp: an overflowing ratio would turn the zero gradient into NaN.
    log_ratio = torch.where(step.trained, log_ratio, 0.0)
    scored = log_ratio
    if objective.ratio_norm != "none":
        old_mean = transition_mean(step.x, step.velocity.detach(), c)
        scored = normalised_log_ratio(log_ratio, mean, old_mean, c)
        scored = torch.where(step.trained, scored, 0.0)
    policy_loss, ratio = _surrogate(scored, advantages, objective.clip_range, objective.adv_clip)
    if objective.ratio_norm == "grpo_guard":
        policy_loss = policy_loss / (-c.dt).to(policy_loss)
    stats = _statistics(log_ratio, ratio, policy_loss, objective.clip_range)

    loss = policy_loss
    if objective.kl_beta > 0:
        assert reference_velocity is not None, "a KL term needs the reference model's velocity"
        kl = reference_kl(objective.kl_form, velocity, reference_velocity, c)
        stats["kl"] = kl.detach().double()
        loss = loss + objective.kl_beta * kl
    return torch.where(step.trained, loss, 0.0), stats
