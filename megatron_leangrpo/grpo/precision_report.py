# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""How far rounding alone moves a log-prob in this dtype and layout, against the clip range.

Published clip ranges (1e-3 to 2e-6) are of the size of what bfloat16 adds to a log-prob. The first
update does not see it, because rollout and update compute the same; a later update's ratio does.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.diffusion.kernels import log_prob
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.grpo.placement import Group
from megatron_leangrpo.grpo.policy import Policy
from megatron_leangrpo.grpo.rollout import WaveRollout
from megatron_leangrpo.grpo.schedules.jagg import single_steps
from megatron_leangrpo.grpo.trajectory import TrainedStep, WaveTrajectory
from megatron_leangrpo.models.experts import idle_in_host
from megatron_leangrpo.reporting.console import Console


@dataclass(frozen=True)
class Precision:
    """What a run computes in, and what that does to its ratios."""

    arithmetic: str
    noise: float
    """Largest change of a log-prob by one rounding of the latents, over all ranks."""
    clip_range: float

    @property
    def line(self) -> str:
        """For a person."""
        return (
            f"precision: {self.arithmetic}; one rounding of the latents moves log-probs by up to "
            f"{self.noise:.1e}, grpo.clip_range is {self.clip_range:.1e}"
        )

    @property
    def warning(self) -> str | None:
        """What is wrong with the clip range, or None."""
        if self.noise <= self.clip_range:
            return None
        return (
            f"grpo.clip_range = {self.clip_range:g} is below the noise of log-probs, "
            f"{self.noise:.1e}: second and later updates would be clipped by rounding; raise it "
            "above, or use model.dtype = float32"
        )


@torch.no_grad()
def measure_precision(experiment: Experiment) -> Precision:
    """Roll out a rank's first wave and score its first and last trained step again (a collective).

    The second time as half of a larger batch, whose other half has latents that are one rounding
    away: another layout's sums differ from ours by about as much.
    """
    config, settings = experiment.config, experiment.settings
    prompts = experiment.sampler.batch(0)
    groups = [Group(i, prompt) for i, prompt in enumerate(prompts)]
    runner = experiment.runner("replay")
    wave = runner.place(groups, 0).waves[0]
    conditioning = experiment.encode([groups[slot.group].prompt.text for slot in wave.slots])
    plans = settings.plans(wave, 0)
    with idle_in_host(experiment.policy.model):
        sampling = settings.begin(wave, 0, plans, experiment.policy.latent_dtype)
        rollout = WaveRollout(sampling, wave, conditioning, single_steps(plans))
        (trajectory,) = runner.passes.roll_out([rollout])
        trajectory.check_finite(1)
        steps, latents = (trajectory.steps[0], trajectory.steps[-1]), trajectory.latents
        noise = max(
            _noise(experiment.policy, trajectory, _on_all_stages(s, latents)) for s in steps
        )
    largest = torch.tensor(noise, dtype=torch.float64, device=platform.device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    arithmetic = config.model.dtype
    if config.fp8.recipe != "none":
        arithmetic += f" with FP8 ({config.fp8.recipe}, {config.fp8.backend})"
    return Precision(arithmetic, largest.item(), config.grpo.clip_range)


def _on_all_stages(step: TrainedStep, latents: torch.Tensor) -> TrainedStep:
    """A step with the latents that only the last pipeline stage has."""
    if platform.pp_size() == 1:
        return step
    is_last = platform.pp_rank() == platform.pp_size() - 1
    shapes = {"x": latents, "x_next": latents, "old_log_prob": latents[:, 0, 0]}
    return replace(
        step,
        **{
            name: platform.from_last_stage(
                getattr(step, name) if is_last else torch.empty_like(like)
            )
            for name, like in shapes.items()
        },
    )


def _noise(policy: Policy, trajectory: WaveTrajectory, step: TrainedStep) -> float:
    rows = len(step.x)
    moved = _neighbours(step.x.to(policy.dtype)).to(step.x)
    conditioning = trajectory.conditioning.select([*range(rows)] * 2)
    inputs = torch.cat((step.x, moved)), torch.cat((step.timestep, step.timestep))
    changes = [
        log_prob(step.x, velocity, step.x_next, step.coefficients) - step.old_log_prob
        for velocity in policy(*inputs, conditioning).chunk(2)
    ]
    return max(torch.where(step.trained, change, 0.0).abs().max().item() for change in changes)


def _neighbours(x: torch.Tensor) -> torch.Tensor:
    """Each number moved by at most one unit in its last place, up or down."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, x.shape, generator=generator, dtype=torch.float64).to(x.device) * 2 - 1
    return (x.double() * (1 + signs * torch.finfo(x.dtype).eps / 2)).to(x.dtype)


def report_precision(experiment: Experiment, console: Console) -> None:
    """Say what `measure_precision` finds (a collective)."""
    precision = measure_precision(experiment)
    console.line(precision.line)
    if precision.warning is not None:
        console.warning(precision.warning)
