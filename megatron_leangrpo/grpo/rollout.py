# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The rollout of one wave: noise by sample, the sampling loop, and what the update will need."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.conditioning.encoders import Conditioning
from megatron_leangrpo.config import SamplingConfig
from megatron_leangrpo.diffusion.kernels import check_kernel, step_coefficients
from megatron_leangrpo.diffusion.sampler import rollout
from megatron_leangrpo.diffusion.selection import StepPlan, StepSelector, build_step_selector
from megatron_leangrpo.diffusion.sigmas import SigmaSchedule, build_sigma_schedule
from megatron_leangrpo.grpo.placement import Wave
from megatron_leangrpo.grpo.policy import Policy
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


def sigma_schedule(config: SamplingConfig, num_steps: int, image_tokens: int) -> SigmaSchedule:
    """Build the run's sigma schedule with `num_steps` steps."""
    return build_sigma_schedule(
        config.sigma_schedule,
        num_steps,
        image_tokens=image_tokens,
        shift=config.shift,
        truncate_timesteps=config.truncate_timesteps,
    )


def roll_out_wave(
    policy: Policy,
    settings: RolloutSettings,
    wave: Wave,
    conditioning: Conditioning,
    iteration: int,
    plans: Sequence[StepPlan],
    windows: Sequence[Sequence[int]],
    on_window: Callable[[WaveTrajectory, Window], None] | None = None,
) -> WaveTrajectory:
    """Sample the trajectories of a wave.

    `windows` are the trained steps, grouped. With `on_window` the ends of each window are recorded
    by autograd, and the window is handed to it as soon as its last step is drawn.
    """
    samples = [(slot.prompt_id, slot.member) for slot in wave.slots]
    device, dtype, shape = platform.device(), policy.latent_dtype, settings.latent_shape
    shared = settings.shared_initial_noise
    starts = [(prompt, None if shared else member) for prompt, member in samples]
    x = initial_noise_batch(settings.seed, iteration, starts, shape, dtype).to(device)

    def noise(step: int) -> torch.Tensor:
        return step_noise_batch(settings.seed, iteration, samples, step, shape, dtype).to(device)

    recorder = _Recorder(
        WaveTrajectory(wave, conditioning), settings, plans, windows, on_window, device
    )
    recorder.trajectory.latents = rollout(
        lambda x, timestep: policy(x, timestep, conditioning),
        x,
        settings.schedule,
        settings.kernel,
        settings.level,
        plans,
        noise,
        hook=recorder,
        output=settings.output,
    )
    return recorder.trajectory


@dataclass
class _Recorder:
    """Keeps the trained steps of a wave as the sampler passes them."""

    trajectory: WaveTrajectory
    settings: RolloutSettings
    plans: Sequence[StepPlan]
    windows: Sequence[Sequence[int]]
    on_window: Callable[[WaveTrajectory, Window], None] | None
    device: torch.device
    open: list[TrainedStep] = field(default_factory=list)
    """Steps of the window that is being drawn."""

    def keeps_graph(self, step: int) -> bool:
        return self.on_window is not None and any(
            step in (window[0], window[-1]) for window in self.windows
        )

    def record(self, step, velocity, x, x_next, log_prob) -> None:
        window = next((window for window in self.windows if step in window), None)
        if window is None:
            return
        self.open.append(self._trained_step(step, velocity, x, x_next, log_prob))
        if step == window[-1]:
            closed, self.open = Window(self.open), []
            self.trajectory.windows.append(closed)
            if self.on_window is not None:
                self.on_window(self.trajectory, closed)

    def _trained_step(self, step, velocity, x, x_next, log_prob) -> TrainedStep:
        settings = self.settings
        stochastic = [step in plan.stochastic for plan in self.plans]
        coefficients = step_coefficients(
            settings.kernel, settings.level, settings.schedule.sigmas, step, stochastic
        ).to(self.device)
        trained = [step in plan.trained for plan in self.plans]
        return TrainedStep(
            index=step,
            timestep=settings.schedule.timesteps[step].to(x).expand(x.shape[0]),
            coefficients=coefficients,
            x=x,
            x_next=x_next,
            old_log_prob=log_prob,
            trained=torch.tensor(trained, device=self.device),
            velocity=velocity,
        )
