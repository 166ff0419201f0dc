# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The sampling loop over one micro-batch of trajectories."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_leangrpo.diffusion.kernels import draw_step, predicted_x0, step_coefficients
from megatron_leangrpo.diffusion.selection import StepPlan
from megatron_leangrpo.diffusion.sigmas import SigmaSchedule


class RolloutHook(Protocol):
    """What a gradient schedule sees of a rollout."""

    def keeps_graph(self, step: int) -> bool:
        """Whether the coming forward must be recorded by autograd."""

    def record(
        self, step: int, velocity: Tensor, x: Tensor, x_next: Tensor, log_prob: Tensor
    ) -> None:
        """Receive a finished step; only `velocity` may carry a graph."""


def rollout(
    policy: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    schedule: SigmaSchedule,
    kernel: str,
    level: float | None,
    plans: Sequence[StepPlan],
    noise: Callable[[int], Tensor],
    hook: RolloutHook | None = None,
    output: Literal["final", "predicted_x0"] = "final",
) -> Tensor:
    """Sample from `x` [b, ...] to the last latent, or to the clean latent the last step predicts.

    `policy(x, timestep)` gets timesteps [b] in [0, 1] in the type of `x` and returns the velocity.
    `plans` has one entry per sample; a step outside a sample's plan is deterministic, so plans
    without stochastic steps make this an ODE sampler. `noise(step)` [b, ...] is called only for
    steps at which some sample is stochastic. Latents stay in the type of `x` whatever the model's,
    and are detached between steps. Raises FloatingPointError naming the first step after which a
    latent is not finite.
    """
    batch = x.shape[0]
    assert len(plans) == batch, f"{len(plans)} plans for {batch} samples"
    x = x.detach()
    finite = []
    for step in range(schedule.num_steps):
        stochastic = [step in plan.stochastic for plan in plans]
        c = step_coefficients(kernel, level, schedule.sigmas, step, stochastic).to(x.device)
        timestep = schedule.timesteps[step].to(x).expand(batch)
        with torch.set_grad_enabled(hook is not None and hook.keeps_graph(step)):
            velocity = policy(x, timestep)
        assert velocity.shape == x.shape, f"velocity {velocity.shape} for latents {x.shape}"
        with torch.no_grad():
            step_noise = noise(step) if any(stochastic) else None
            transition = draw_step(x, velocity, step_noise, c)
            if output == "predicted_x0" and step == schedule.num_steps - 1:
                result = predicted_x0(x, velocity, c).to(x.dtype)
            else:
                result = transition.x_next
            finite.append(result.isfinite().all())
        if hook is not None:
            hook.record(step, velocity, x, transition.x_next, transition.log_prob)
        x = transition.x_next
    _check_finite(finite, schedule)
    return result


def _check_finite(finite: list[Tensor], schedule: SigmaSchedule) -> None:
    # One synchronisation for the whole trajectory instead of one a step.
    flags = torch.stack(finite).tolist()
    if not all(flags):
        step = flags.index(False)
        raise FloatingPointError(
            f"latents are not finite after sampling step {step} of {schedule.num_steps} "
            f"(sigma {schedule.sigmas[step].item():.6g})"
        )
