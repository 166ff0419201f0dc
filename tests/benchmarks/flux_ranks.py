# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Our schedules beside replay over diffusers' model under FSDP2, on two data-parallel ranks.

    python launch/run_ranks.py --nproc-per-node 2 -m tests.benchmarks.flux_ranks

Recipe flux_bench, 15 of 16 steps trained, micro-batch 1 and 4, a group of one micro-batch a rank.
FSDP2 gathers the parameters and reduces the gradients at every step, as DanceGRPO's loop has it;
our schedules reduce once. Interleaved, medians, the slower rank counts.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.reporting.console import Console
from tests.benchmarks.benchmark import keep_freed_memory, run_case, save
from tests.benchmarks.cases import Case, add_arguments
from tests.benchmarks.contestants import (
    Contestant,
    OurIteration,
    diffusers_contestant,
    our_contestant,
)
from tests.benchmarks.diffusers_loop import micro_batches
from tests.benchmarks.fsdp_loop import ShardedLoop

TITLE = (
    "One GRPO iteration on two data-parallel ranks: how much shorter are the blue bars?\n"
    "DanceGRPO's loop gathers parameters and reduces gradients at every step, ours reduces once."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batch-size", type=int, nargs="+", choices=(1, 4), default=[1, 4])
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    platform.initialize_distributed()
    ranks = platform.world_size()
    if ranks < 2:
        parser.error("needs two ranks: start it with launch/run_ranks.py --nproc-per-node 2")
    console = Console(enabled=platform.is_logging_rank())
    reports = []
    for size in arguments.micro_batch_size:
        case = Case(15, size, group_size=size * ranks, ranks=ranks, quick=arguments.quick)
        # The exact schedules agree to rounding; tests.benchmarks.schedules measures replay as well.
        reports.append(run_case(case, contestants(case), "retain", arguments, console))
    save(console, reports, Path(arguments.output), "flux_ranks", TITLE)


def contestants(case: Case) -> list[Contestant]:
    """The sharded diffusers loop and our schedules."""
    experiment = case.build()
    batches = micro_batches(experiment, OurIteration(experiment, "replay").advantages())
    sharded = ShardedLoop(experiment, batches)
    return [
        diffusers_contestant(sharded, "replay, diffusers, FSDP2", "full recomputation"),
        *(our_contestant(experiment, schedule) for schedule in case.schedules),
    ]


if __name__ == "__main__":
    keep_freed_memory()
    main()
    platform.destroy_distributed()
