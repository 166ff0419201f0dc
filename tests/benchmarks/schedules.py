# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Our schedules beside replay over diffusers' model and over ours, in one process on one thread.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.schedules [--family flux | wan]

Recipes flux_bench and wan_bench: 16 steps, 9 or 15 of them trained. All contestants run interleaved
with the same weights, prompts, noise, advantages and micro-batches; before any clock runs, their
gradients are compared. Only rollout and update count.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.reporting.console import Console
from tests.benchmarks.benchmark import keep_freed_memory, run_case, save
from tests.benchmarks.cases import FAMILIES, Case, add_arguments, positive, whole_groups
from tests.benchmarks.contestants import (
    Contestant,
    OurIteration,
    diffusers_contestant,
    our_contestant,
)
from tests.benchmarks.diffusers_loop import DiffusersLoop, micro_batches

TITLE = (
    "One GRPO iteration on one core: how much shorter are the blue bars than the grey ones?\n"
    "Replay runs every trained step's forward twice; retain and reweight once; jagg also drops "
    "backwards."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, default="flux")
    parser.add_argument("--trained-steps", type=int, nargs="+", choices=(9, 15), default=[9, 15])
    parser.add_argument("--micro-batch-size", type=positive, default=1)
    parser.add_argument("--group-size", type=positive, default=2)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        whole_groups(arguments.group_size, arguments.micro_batch_size, ranks=1)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    platform.initialize_distributed()
    console = Console()
    reports = []
    for steps in arguments.trained_steps:
        case = Case(
            steps,
            arguments.micro_batch_size,
            arguments.group_size,
            quick=arguments.quick,
            family=arguments.family,
        )
        reports.append(run_case(case, contestants(case), "replay, ours", arguments, console))
    save(console, reports, Path(arguments.output), f"{arguments.family}_schedules", TITLE)


def contestants(case: Case) -> list[Contestant]:
    """Both replays of both sides, and our other schedules."""
    experiment, recomputing = case.build(), case.build(recompute_granularity="full")
    batches = micro_batches(experiment, OurIteration(experiment, "replay").advantages())
    plain, checkpointing = (DiffusersLoop(experiment, batches, on) for on in (False, True))
    full = "full recomputation"
    return [
        diffusers_contestant(plain, "replay, diffusers", "replay"),
        diffusers_contestant(checkpointing, f"{full}, diffusers", full),
        our_contestant(experiment, "replay", "replay, ours"),
        our_contestant(recomputing, "replay", f"{full}, ours", full),
        *(our_contestant(experiment, schedule) for schedule in case.schedules),
    ]


if __name__ == "__main__":
    keep_freed_memory()
    main()
    platform.destroy_distributed()
