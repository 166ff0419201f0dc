# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""`leangrpo plan`: every schedule on every layout of some GPUs, without a model or a rank."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Sequence

from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.files import atomic_write
from megatron_leangrpo.grpo.architecture import resolve_architecture
from megatron_leangrpo.grpo.experiment import objective_config
from megatron_leangrpo.grpo.placement import check_placement
from megatron_leangrpo.grpo.planning import (
    all_candidates,
    batches_of,
    configured_ranks,
    workload_of,
)
from megatron_leangrpo.pipeline.order import phases, same_windows
from megatron_leangrpo.pipeline.simulator import simulate
from megatron_leangrpo.pipeline.timeline import save_timeline
from megatron_leangrpo.planner.gpus import Gpu, find_gpu
from megatron_leangrpo.planner.pipelining import stage_times, waves_in_flight
from megatron_leangrpo.planner.report import (
    configured_line,
    pipeline_line,
    print_plan,
    to_json,
)
from megatron_leangrpo.planner.selector import Candidate, Choice, choose
from megatron_leangrpo.planner.workload import Ranks, Workload
from megatron_leangrpo.reporting.console import Console

MOST_GPUS = 1024
_STAGES = (2, 4, 8)
"""Sizes of pipelines to look at."""


def plan(
    config: RunConfig,
    gpu_name: str,
    gpus: int | None,
    json_path: str | None = None,
    timeline_path: str | None = None,
) -> None:
    """Print the plan of a run, write it as JSON, and draw the best layout with pipeline stages."""
    gpu = find_gpu(gpu_name)
    count = gpus if gpus is not None else min(gpu.per_node, 8)
    if not 1 <= count <= MOST_GPUS:
        raise ValueError(f"--gpus = {count}; valid: 1 to {MOST_GPUS}")
    objective_config(config)
    # The layout of the recipe is one of many here.
    single = dataclasses.replace(
        config,
        parallel=dataclasses.replace(
            config.parallel, tensor_model_parallel_size=1, context_parallel_size=1
        ),
    )
    architecture = resolve_architecture(single, needs_weights=False)
    work = workload_of(single, architecture)
    layouts = _layouts(config, work, gpu, count)
    found = all_candidates(config, work, layouts, gpu)
    device = f"{count} x {gpu.name}"
    choice = choose(work, found, gpu.budget, device)
    console, configured = Console(), configured_ranks(config, count)
    print_plan(console, _title(config, work, gpu, count), choice, work, gpu)
    own = [candidate for candidate in found if candidate.ranks == configured]
    if own and choice.chosen not in own:
        console.line(configured_line(_choose_or_why_not(work, own, gpu, device), configured))
    staged = all_candidates(config, work, _possible(config, work, gpu, count, _STAGES), gpu)
    fitting = [c for c in staged if c.problem is None and c.fits(gpu.budget)]
    if fitting:
        best = min(fitting, key=lambda c: (c.seconds.total, c.memory.total))
        console.line(pipeline_line(best, choice.chosen))
        if timeline_path is not None:
            _draw(timeline_path, config, work, best, gpu)
    elif timeline_path is not None:
        console.line("--timeline: no layout with pipeline stages fits, so there is none to draw")
    if json_path is not None:
        settings = {**dataclasses.asdict(config), "gpu": gpu.name, "gpus": count}
        report = to_json(choice, work, gpu, settings)
        atomic_write(json_path, json.dumps(report, indent=2) + "\n")


def _draw(path: str, config: RunConfig, work: Workload, best: Candidate, gpu: Gpu) -> None:
    """The first waves of an iteration on the stages, rewards and the update left out."""
    ranks, steps = best.ranks, work.sampled_steps
    batch = batches_of(config)(ranks.data)
    times = stage_times(work, batch, best.recompute, ranks, gpu)
    flight = waves_in_flight(batch, best.schedule, ranks.pipeline)
    windows = same_windows(flight, range(work.trained_steps))
    first_step, *_ = phases("rollout", ranks.pipeline, 1, windows)
    panels = {"rollout, step by step": [simulate(first_step, times)] * steps}
    for name in ("rollout", best.schedule):
        order = phases(name, ranks.pipeline, steps, windows)
        panels[name] = [simulate(phase, times) for phase in order]
    title = f"{config.recipe} on {ranks}: {flight} waves in flight, {steps} steps"
    save_timeline(path, panels, title, unit="seconds")


def _choose_or_why_not(
    work: Workload, found: Sequence[Candidate], gpu: Gpu, device: str
) -> Choice | ValueError:
    try:
        return choose(work, found, gpu.budget, device)
    except ValueError as error:
        return error


def _layouts(config: RunConfig, work: Workload, gpu: Gpu, gpus: int) -> Sequence[Ranks]:
    """Parallel sizes that heads, nodes and groups allow."""
    layouts = _possible(config, work, gpu, gpus)
    if not layouts:
        below = next((n for n in range(gpus, 0, -1) if _possible(config, work, gpu, n)), None)
        above = next(
            (n for n in range(gpus, MOST_GPUS + 1) if _possible(config, work, gpu, n)), None
        )
        near = " or ".join(str(n) for n in (below, above) if n is not None)
        grpo = config.grpo
        raise ValueError(
            f"--gpus = {gpus}: no tensor-parallel size that divides the {work.shape.heads} heads "
            f"leaves data-parallel ranks among which {grpo.prompts_per_iteration} prompts x "
            f"{grpo.group_size} samples in {grpo.updates_per_rollout} updates can be dealt; "
            f"nearest valid: {near}"
        )
    return layouts


def _possible(
    config: RunConfig, work: Workload, gpu: Gpu, gpus: int, stages: Sequence[int] = (1,)
) -> list[Ranks]:
    grpo, layouts = config.grpo, []
    blocks = sum(count for _, count in work.shape.blocks)
    sizes = range(1, min(gpus, gpu.per_node) + 1)
    for tp, cp, pp in itertools.product(sizes, sizes, stages):
        # The ranks of a trajectory stay inside a node; heads are padded for the context.
        if work.shape.heads % tp or gpus % (tp * cp * pp) or gpu.per_node % (tp * cp):
            continue
        if pp > blocks:
            continue
        ranks = Ranks(tp, cp, gpus // (tp * cp * pp), pp)
        with contextlib.suppress(ValueError):
            check_placement(
                grpo.prompts_per_iteration,
                grpo.group_size,
                ranks.data,
                grpo.placement,
                grpo.updates_per_rollout,
            )
            layouts.append(ranks)
    return layouts


def _title(config: RunConfig, work: Workload, gpu: Gpu, gpus: int) -> str:
    sampling, grpo = config.sampling, config.grpo
    frames = f" x {sampling.num_frames} frames" if sampling.num_frames > 1 else ""
    guidance = ", guided" if work.guided else ""
    return (
        f"{config.recipe} on {gpus} x {gpu.name}: {work.shape.parameters / 1e9:.2f} B parameters, "
        f"{sampling.height} x {sampling.width}{frames} = {work.shape.image_tokens} tokens"
        f"{guidance}, {grpo.prompts_per_iteration} prompts x {grpo.group_size} samples"
    )
