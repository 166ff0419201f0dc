# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""JAGG: the W backwards of a window of consecutive steps become those of its two ends.

Between the first step a and the last step b the Jacobian of the velocity is taken as linear in
sigma. With lambda_k = (sigma_a - sigma_k) / (sigma_a - sigma_b) and c_k the gradient of the loss
with respect to the velocity of step k,

    sum_k J_k^T c_k  ~  J_a^T u_a + J_b^T u_b
    u_a = sum_k (1 - lambda_k) c_k,   u_b = sum_k lambda_k c_k

This is exact for one and two steps, and for a Jacobian that is affine in sigma with the latents on
the line between their ends. A stochastic kernel leaves that line; docs/jagg.md has measurements.
"""

from collections.abc import Sequence

import torch

from megatron_leangrpo.diffusion.selection import StepPlan
from megatron_leangrpo.grpo.trajectory import TrainedStep, Window

StepWindow = tuple[int, ...]
"""Indices of consecutive steps."""


def single_steps(plans: Sequence[StepPlan]) -> list[StepWindow]:
    """The steps that some trajectory trains, each for itself."""
    return [(step,) for step in sorted({step for plan in plans for step in plan.trained})]


def consecutive_windows(
    plans: Sequence[StepPlan], size: int, boundary: int | None = None
) -> list[StepWindow]:
    """Group consecutive steps that the same trajectories train, `size` steps at most.

    The last window of a run of steps may be shorter. Steps that were drawn one by one stay single.
    None contains both `boundary`, from which another transformer runs, and the step before it.
    """
    windows: list[list[int]] = []
    previous = None
    for (step,) in single_steps(plans):
        rows = tuple(step in plan.trained for plan in plans)
        drawn_singly = any(plan.drawn_singly for plan, row in zip(plans, rows) if row)
        joins = windows and step == windows[-1][-1] + 1 and rows == previous and not drawn_singly
        if joins and step != boundary and len(windows[-1]) < size:
            windows[-1].append(step)
        else:
            windows.append([step])
        previous = rows
    return [tuple(window) for window in windows]


def line_positions(steps: Sequence[TrainedStep]) -> list[torch.Tensor]:
    """Return lambda_k of each step, `[b]` or `[1]` in float64: 0 at the first, 1 at the last."""
    first, last = steps[0].coefficients.sigma, steps[-1].coefficients.sigma
    return [(first - step.coefficients.sigma) / (first - last) for step in steps]


def interpolate(window: Window, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Turn the cotangent of each step `[b, s, c]` into those of the window's ends."""
    if len(cotangents) == 1:
        return list(cotangents)
    ends = [torch.zeros_like(cotangents[0]), torch.zeros_like(cotangents[0])]
    for position, cotangent in zip(line_positions(window.steps), cotangents, strict=True):
        weight = _per_sample(position, cotangent)
        ends[0] += (1 - weight) * cotangent
        ends[1] += weight * cotangent
    return ends


def agreement(steps: Sequence[TrainedStep]) -> torch.Tensor:
    """Cosine `[b]` of the velocities between the ends with the line between the end velocities.

    It ranks windows by how well `interpolate` holds there; the mean over the steps in between.
    """
    first, last = steps[0].velocity.detach(), steps[-1].velocity.detach()
    cosines = []
    for position, step in list(zip(line_positions(steps), steps))[1:-1]:
        line = torch.lerp(first, last, _per_sample(position, first))
        cosines.append(
            torch.cosine_similarity(step.velocity.detach().flatten(1), line.flatten(1), dim=1)
        )
    return torch.stack(cosines).mean(dim=0).double()


def _per_sample(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.to(like).reshape(-1, *[1] * (like.dim() - 1))
