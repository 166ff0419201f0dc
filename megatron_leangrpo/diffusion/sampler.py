# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The sampling steps of one micro-batch of trajectories, from the first latents to the last."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron_leangrpo.diffusion.kernels import (
    StepCoefficients,
    Transition,
    draw_step,
    predicted_x0,
    step_coefficients,
)
from megatron_leangrpo.diffusion.selection import StepPlan
from megatron_leangrpo.diffusion.sigmas import SigmaSchedule

CHECKED = ("velocity", "log-probability", "latent")
"""What of each step must be finite, in the order in which one spoils the next."""


class Sampling:
    """Trajectories on their way through the steps: whoever has a velocity calls `advance`.

    `plans` has one entry per sample; a step outside a sample's plan is deterministic, so plans
    without stochastic steps make this an ODE sampler. `noise(step)` [b, ...] is called only for
    steps at which some sample is stochastic. Latents stay in the type of `x` [b, ...] whatever the
    model's, and are detached between steps. `output` is the last latent or the clean latent that
    the last step predicts.
    """

    def __init__(
        self,
        x: Tensor,
        schedule: SigmaSchedule,
        kernel: str,
        level: float | None,
        plans: Sequence[StepPlan],
        noise: Callable[[int], Tensor],
        output: Literal["final", "predicted_x0"] = "final",
    ) -> None:
        assert x.shape[0] == len(plans), f"{len(plans)} plans for {x.shape[0]} samples"
        self.x, self.step = x.detach(), 0
        self.schedule, self.plans = schedule, plans
        self._kernel, self._level, self._noise, self._output = kernel, level, noise, output
        self._finite: list[Tensor] = []

    @property
    def is_done(self) -> bool:
        """Whether every step has been drawn."""
        return self.step == self.schedule.num_steps

    @property
    def timestep(self) -> Tensor:
        """`[b]` in [0, 1]: what the model is given at the coming step."""
        return self.timestep_at(self.step)

    def timestep_at(self, step: int) -> Tensor:
        """`[b]`, that of any step."""
        return self.schedule.timesteps[step].to(self.x).expand(self.x.shape[0])

    def coefficients(self, step: int) -> StepCoefficients:
        """The kernel's coefficients at a step, which is stochastic for some samples."""
        stochastic = [step in plan.stochastic for plan in self.plans]
        c = step_coefficients(self._kernel, self._level, self.schedule.sigmas, step, stochastic)
        return c.to(self.x.device)

    @torch.no_grad()
    def advance(self, velocity: Tensor) -> Transition:
        """Draw the step whose velocity this is."""
        step, x = self.step, self.x
        assert velocity.shape == x.shape, f"velocity {velocity.shape} for latents {x.shape}"
        is_stochastic = any(step in plan.stochastic for plan in self.plans)
        c = self.coefficients(step)
        transition = draw_step(x, velocity, self._noise(step) if is_stochastic else None, c)
        self.step, self.x = step + 1, transition.x_next
        self._result = self.x
        if self.is_done and self._output == "predicted_x0":
            self._result = predicted_x0(x, velocity, c).to(x.dtype)
        found = [v.isfinite() for v in (velocity, transition.log_prob, self._result)]
        self._finite.append(torch.stack([flags.reshape(len(x), -1).all(1) for flags in found]))
        return transition

    @property
    def finite(self) -> Tensor:
        """`[steps, 3, b]` bool: whether each of `CHECKED` was, for each sample."""
        return torch.stack(self._finite)

    @property
    def result(self) -> Tensor:
        """The output `[b, ...]`, finite or not."""
        assert self.is_done, f"{self.step} of {self.schedule.num_steps} steps were drawn"
        return self._result
