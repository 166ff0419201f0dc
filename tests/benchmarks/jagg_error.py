# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""How far jagg's gradient is from the exact one, by kernel, noise, window and position.

    python -m tests.benchmarks.jagg_error [--json FILE]

The embedded tiny FLUX (flux_digits), 8 prompts x 8 samples with shared initial noise. One window of
W consecutive steps is stochastic and trained, everything else is deterministic; the gradient is
that of all weights, over all samples. It prints the table of docs/jagg.md.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.config_reader import read_config, read_recipe
from megatron_leangrpo.files import atomic_write
from megatron_leangrpo.grpo.experiment import build_experiment
from megatron_leangrpo.reporting.console import Console
from megatron_leangrpo.reporting.quiet import quiet_libraries

KERNELS = (
    ("dance_sde", 0.1),
    ("dance_sde", 0.3),
    ("flow_sde", 0.7),
    ("flow_sde", 0.9),
    ("cps", 0.8),
)
# Steps of the rollout, W, and the first step of the window.
WINDOWS = (
    (8, 3, 0),
    (8, 3, 2),
    (8, 3, 4),
    (8, 4, 0),
    (8, 4, 3),
    (16, 3, 0),
    (16, 3, 4),
    (16, 4, 0),
    (16, 4, 8),
    (16, 5, 0),
    (16, 5, 8),
    (16, 6, 0),
    (16, 6, 8),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured window."""

    kernel: str
    noise_level: float
    num_steps: int
    window: int
    first: int
    velocity_cosine: float
    """The score that routes."""
    gradient_cosine: float
    gradient_error: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--kernels", nargs="*", help="only these, e.g. dance_sde")
    arguments = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    platform.initialize_distributed()
    console, rows = Console(), []
    cases = list(_cases(arguments.kernels))
    with console.progress("measuring", len(cases)) as advance:
        for kernel, level, steps, window, first in cases:
            rows.append(measure(kernel, level, steps, window, first))
            advance(1)
    print("| kernel | N | W | first step | velocity cosine | gradient cosine | gradient error |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.kernel} {row.noise_level} | {row.num_steps} | {row.window} | {row.first} "
            f"| {row.velocity_cosine:.3f} | {row.gradient_cosine:.3f} | {row.gradient_error:.2f} |"
        )
    if arguments.json:
        atomic_write(arguments.json, json.dumps([dataclasses.asdict(row) for row in rows]) + "\n")


def _cases(kernels: list[str] | None) -> Iterator[tuple[str, float, int, int, int]]:
    for kernel, level in KERNELS:
        for window in WINDOWS:
            if not kernels or kernel in kernels:
                yield kernel, level, *window


def measure(kernel: str, level: float, num_steps: int, window: int, first: int) -> Row:
    """Score a window in one iteration and approximate it in the next, beside the exact gradient."""
    experiment = build_experiment(_config(kernel, level, num_steps, window, first))
    runner, batch = experiment.runner("jagg"), experiment.sampler.batch(0)
    runner.run(0, batch)
    metrics = runner.run(0, batch).metrics
    return Row(
        kernel,
        level,
        num_steps,
        window,
        first,
        metrics["jagg_score"],
        metrics["jagg_gradient_cosine"],
        metrics["jagg_gradient_error"],
    )


def _config(kernel: str, level: float, num_steps: int, window: int, first: int) -> RunConfig:
    config = read_config(
        read_recipe("flux_tiny"),
        [
            f"--sampling.kernel={kernel}",
            f"--sampling.noise_level={level}",
            f"--sampling.num_steps={num_steps}",
            f"--sampling.shift={3.0 if kernel == 'dance_sde' else 1.0}",
            f"--sampling.window_size={window}",
            f"--sampling.window_starts=[{first}]",
            "--grpo.prompts_per_iteration=8",
            "--grpo.group_size=8",
            "--grpo.micro_batch_size=64",
            "--grpo.jagg_frac=1",
            f"--grpo.jagg_window={window}",
            "--grpo.jagg_check_interval=1",
        ],
    )
    # A reward that costs nothing: the error is one of the gradient for given advantages.
    reward = dataclasses.replace(config.reward, weights={"jpeg_incompressibility": 1.0})
    return dataclasses.replace(config, reward=reward)


if __name__ == "__main__":
    main()
