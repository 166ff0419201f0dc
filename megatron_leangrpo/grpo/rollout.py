# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The rollout of one wave: noise by sample, the sampling loop, and what the update will need."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.conditioning.encoders import Conditioning
from megatron_leangrpo.config import SamplingConfig
from megatron_leangrpo.diffusion.kernels import check_kernel
from megatron_leangrpo.diffusion.sampler import Sampling
from megatron_leangrpo.diffusion.selection import StepPlan, StepSelector, build_step_selector
from megatron_leangrpo.diffusion.sigmas import SigmaSchedule, build_sigma_schedule
from megatron_leangrpo.grpo.placement import Wave
from megatron_leangrpo.grpo.trajectory import TrainedStep, WaveTrajectory, Window
from megatron_leangrpo.parallel.noise import initial_noise_batch, step_noise_batch


@dataclass(frozen=True)
class RolloutSettings:
    """Everything about sampling that does not change during a run."""

    schedule: SigmaSchedule
    kernel: str
    level: float | None
    selector: StepSelector
    output: str
    shared_initial_noise: bool
    latent_shape: tuple[int, ...]
    """Shape of one sample's latents, `(s, c)`."""
    seed: int

    @classmethod
    def from_config(
        cls, config: SamplingConfig, latent_shape: tuple[int, ...], seed: int
    ) -> "RolloutSettings":
        """Check the sampling section and build its parts."""
        check_kernel(config.kernel, config.noise_level)
        selector = build_step_selector(
            config.step_selection,
            config.num_steps,
            timestep_fraction=config.timestep_fraction,
            block_size=config.block_size,
            window_size=config.window_size,
            window_starts=config.window_starts,
            window_interval=config.window_interval,
            window_stride=config.window_stride,
            window_decay=config.window_decay,
            window_decay_start=config.window_decay_start,
            scope=config.selection_scope,
        )
        return cls(
            schedule=sigma_schedule(config, config.num_steps, latent_shape[0]),
            kernel=config.kernel,
            level=config.noise_level,
            selector=selector,
            output=config.output,
            shared_initial_noise=config.shared_initial_noise,
            latent_shape=latent_shape,
            seed=seed,
        )

    def plans(self, wave: Wave, iteration: int) -> list[StepPlan]:
        """Which steps of each of the wave's trajectories are stochastic, and which are trained."""
        return [
            self.selector.plan(self.seed, iteration, slot.prompt_id, slot.member)
            for slot in wave.slots
        ]

    def begin(
        self, wave: Wave, iteration: int, plans: Sequence[StepPlan], dtype: torch.dtype
    ) -> Sampling:
        """Draw the noise that a wave starts from; its latents are of `dtype`."""
        samples = [(slot.prompt_id, slot.member) for slot in wave.slots]
        starts = [(i, None if self.shared_initial_noise else member) for i, member in samples]
        shape, device = self.latent_shape, platform.device()
        x = initial_noise_batch(self.seed, iteration, starts, shape, dtype).to(device)

        def noise(step: int) -> torch.Tensor:
            drawn = step_noise_batch(self.seed, iteration, samples, step, shape, dtype)
            return drawn.to(device)

        kernel = self.kernel, self.level
        return Sampling(x, self.schedule, *kernel, plans, noise, self.output)


def sigma_schedule(config: SamplingConfig, num_steps: int, image_tokens: int) -> SigmaSchedule:
    """Build the run's sigma schedule with `num_steps` steps."""
    return build_sigma_schedule(
        config.sigma_schedule,
        num_steps,
        image_tokens=image_tokens,
        shift=config.shift,
        truncate_timesteps=config.truncate_timesteps,
    )


class WaveRollout:
    """A wave on its way through the sampling steps; whoever has a velocity calls `draw`.

    `windows` are the trained steps, grouped.
    """

    def __init__(
        self,
        sampling: Sampling,
        wave: Wave,
        conditioning: Conditioning,
        windows: Sequence[Sequence[int]],
    ) -> None:
        self.sampling, self.windows = sampling, windows
        self.trajectory = WaveTrajectory(wave, conditioning)
        self._open: list[TrainedStep] = []
        """Steps of the window that is being drawn."""

    @property
    def is_on_policy(self) -> bool:
        """Whether the first update trains the wave: only its graphs are worth keeping."""
        return self.trajectory.wave.minibatch == 0

    def is_trained(self, step: int) -> bool:
        """Whether some trajectory trains a step."""
        return any(step in window for window in self.windows)

    def is_end(self, step: int) -> bool:
        """Whether a window is differentiated at a step."""
        return any(step in (window[0], window[-1]) for window in self.windows)

    def draw(
        self, velocity: torch.Tensor, reference_velocity: torch.Tensor | None = None
    ) -> Window | None:
        """Draw a step and keep what an update needs; return the window that it completes."""
        step, x = self.sampling.step, self.sampling.x
        drawn = self.sampling.advance(velocity)
        return self._keep(step, x, drawn.x_next, drawn.log_prob, velocity, reference_velocity)

    def pass_by(self, step: int, x: torch.Tensor | None = None) -> None:
        """Take note of a step that another pipeline stage draws; the first one has its latents."""
        nothing = torch.empty(0, device=platform.device())
        self._keep(step, nothing if x is None else x, nothing, nothing, nothing)

    def finish(self, latents: torch.Tensor, finite: torch.Tensor) -> WaveTrajectory:
        """Return the trajectory with its final latents and its steps' `Sampling.finite`."""
        self.trajectory.latents, self.trajectory.finite = latents, finite
        return self.trajectory

    def _keep(self, step: int, *tensors: torch.Tensor | None) -> Window | None:
        window = next((window for window in self.windows if step in window), None)
        if window is None:
            return None
        self._open.append(self._trained_step(step, *tensors))
        if step != window[-1]:
            return None
        closed, self._open = Window(self._open), []
        self.trajectory.windows.append(closed)
        return closed

    def _trained_step(
        self, step: int, x, x_next, old_log_prob, velocity, reference_velocity=None
    ) -> TrainedStep:
        trained = [step in plan.trained for plan in self.sampling.plans]
        return TrainedStep(
            index=step,
            timestep=self.sampling.timestep_at(step),
            coefficients=self.sampling.coefficients(step),
            x=x,
            x_next=x_next,
            old_log_prob=old_log_prob,
            trained=torch.tensor(trained, device=platform.device()),
            velocity=velocity,
            reference_velocity=reference_velocity,
        )
