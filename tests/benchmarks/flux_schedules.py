# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Seconds of replay and retain, of replay with recomputation, and of our rollout and diffusers'.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.flux_schedules [--repeat 5] [--group-size 8]

Recipe flux_bench (N = 16, T = 9) in one process on one thread. All contestants run interleaved,
with the same weights, prompts, noise and micro-batches; medians and ranges are shown.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.config_reader import read_config, read_recipe
from megatron_leangrpo.diffusion.kernels import draw_step, step_coefficients
from megatron_leangrpo.grpo.experiment import Experiment, build_experiment
from megatron_leangrpo.grpo.placement import Group
from megatron_leangrpo.models.flux.config import to_diffusers_config
from megatron_leangrpo.models.flux.weight_map import export_diffusers_state_dict
from megatron_leangrpo.parallel.noise import initial_noise_batch, step_noise_batch
from megatron_leangrpo.reporting.console import Console
from megatron_leangrpo.reporting.quiet import quiet_libraries

FORWARDS = {"replay": 43, "retain": 34, "replay, full recomputation": 52}
"""Forward-equivalents a sample at N = 16, T = 9: N + 3T, N + 2T, N + 4T."""


class DiffusersRollout:
    """The plain loop a user writes: diffusers' transformer, one stochastic step after another."""

    def __init__(self, experiment: Experiment) -> None:
        from diffusers import FluxTransformer2DModel

        config = to_diffusers_config(experiment.architecture.config)
        self.model = FluxTransformer2DModel.from_config(config).eval()
        self.model.load_state_dict(export_diffusers_state_dict(experiment.model))
        self.experiment = experiment
        rows, columns = experiment.policy.grid
        self.image_ids = torch.zeros(rows, columns, 3)
        self.image_ids[..., 1] = torch.arange(rows)[:, None]
        self.image_ids[..., 2] = torch.arange(columns)[None, :]
        self.image_ids = self.image_ids.flatten(0, 1)

    @torch.no_grad()
    def run(self) -> torch.Tensor:
        """Roll out the first iteration's trajectories and return the last wave's latents."""
        experiment, settings = self.experiment, self.experiment.settings
        prompts = experiment.sampler.batch(0)
        groups = [Group(i, prompt) for i, prompt in enumerate(prompts)]
        for wave in experiment.runner("replay").place(groups, 0).waves:
            texts = [groups[slot.group].prompt.text for slot in wave.slots]
            conditioning = experiment.encode(texts)
            samples = [(slot.prompt_id, slot.member) for slot in wave.slots]
            starts = [(prompt, None) for prompt, _ in samples]
            x = initial_noise_batch(settings.seed, 0, starts, settings.latent_shape)
            for step in range(settings.schedule.num_steps):
                velocity = self.model(
                    hidden_states=x,
                    timestep=settings.schedule.timesteps[step].to(x).expand(len(samples)),
                    guidance=conditioning.guidance,
                    encoder_hidden_states=conditioning.prompt_embeds,
                    pooled_projections=conditioning.pooled,
                    txt_ids=torch.zeros(conditioning.prompt_embeds.shape[1], 3),
                    img_ids=self.image_ids,
                ).sample
                c = step_coefficients(
                    settings.kernel, settings.level, settings.schedule.sigmas, step
                )
                noise = step_noise_batch(settings.seed, 0, samples, step, settings.latent_shape)
                x = draw_step(x, velocity, noise, c).x_next
        return x


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=8)
    arguments = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    platform.initialize_distributed()
    experiment, recomputing = (
        _experiment(arguments, granularity) for granularity in ("none", "full")
    )
    runs: dict[str, Callable[[], float]] = {
        "rollout, diffusers": _timed(DiffusersRollout(experiment).run),
        "rollout, ours": lambda: _iteration(experiment, "replay", "time_rollout"),
        "replay": lambda: _iteration(experiment, "replay"),
        "retain": lambda: _iteration(experiment, "retain"),
        "replay, full recomputation": lambda: _iteration(recomputing, "replay"),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    console = Console()
    with console.progress("measuring", arguments.repeat * len(runs)) as advance:
        for _ in range(arguments.repeat):
            for name, run in runs.items():
                times[name].append(run())
                advance(1)
    _report(console, times, arguments)


def _experiment(arguments: argparse.Namespace, recompute_granularity: str) -> Experiment:
    overrides = [
        f"--grpo.micro_batch_size={arguments.micro_batch_size}",
        f"--grpo.group_size={arguments.group_size}",
        f"--model.recompute_granularity={recompute_granularity}",
    ]
    return build_experiment(read_config(read_recipe("flux_bench"), overrides))


def _iteration(experiment: Experiment, schedule: str, phase: str | None = None) -> float:
    metrics = experiment.runner(schedule).run(0, experiment.sampler.batch(0)).metrics
    return metrics[phase] if phase else metrics["time_rollout"] + metrics["time_update"]


def _timed(run: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return timed


def _report(console: Console, times: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    medians = {name: statistics.median(values) for name, values in times.items()}
    retain = medians["retain"]
    rows = []
    for name, values in times.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        ratio = ceiling = ""
        if name in FORWARDS:
            ratio = f"{medians[name] / retain:.2f}"
            ceiling = f"{FORWARDS[name] / FORWARDS['retain']:.2f}"
        rows.append([name, f"{medians[name]:.2f}", spread, ratio, ceiling])
    title = (
        f"flux_bench, group of {arguments.group_size}, micro-batch {arguments.micro_batch_size}, "
        f"one thread, medians of {arguments.repeat} interleaved runs (rewards not counted)"
    )
    console.table(["", "seconds", "range", "against retain", "FLOP ceiling"], rows, title)
    ratio = medians["rollout, ours"] / medians["rollout, diffusers"]
    console.line(f"our rollout takes {ratio:.2f} times the seconds of diffusers'")


if __name__ == "__main__":
    main()
