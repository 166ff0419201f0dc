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
from megatron_leangrpo.pipeline.order import phases
from megatron_leangrpo.pipeline.simulator import simulate
from megatron_leangrpo.pipeline.timeline import save_timeline
from megatron_leangrpo.planner.gpus import Gpu, find_gpu
from megatron_leangrpo.planner.memory import base_of
from megatron_leangrpo.planner.pipelining import stage_times, trained_windows
from megatron_leangrpo.planner.report import configured_lines, label, print_plan, to_json
from megatron_leangrpo.planner.selector import Candidate, Choice, choose
from megatron_leangrpo.planner.workload import Ranks, Workload
from megatron_leangrpo.reporting.console import Console

MOST_GPUS = 1024
_STAGES = (1, 2, 4, 8)
"""Sizes of pipelines to look at, besides the configured one."""


def plan(
    config: RunConfig,
    gpu_name: str,
    gpus: int | None,
    json_path: str | None = None,
    timeline_path: str | None = None,
) -> None:
    """Print the plan of a run, write it as JSON, and draw a layout with pipeline stages."""
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
        on_own = _choose_or_why_not(work, own, gpu, device)
        for line in configured_lines(on_own, configured, work, gpu):
            console.line(line)
    if timeline_path is not None:
        drawn = _to_draw(choice, configured, gpu)
        if drawn is None:
            console.line(
                "--timeline: no layout with pipeline stages fits, so there is none to draw"
            )
        else:
            _draw(timeline_path, config, work, drawn, gpu)
            console.line(f"--timeline: {label(drawn)} is drawn in {timeline_path}")
    if json_path is not None:
        settings = {**dataclasses.asdict(config), "gpu": gpu.name, "gpus": count}
        report = to_json(choice, work, gpu, settings)
        atomic_write(json_path, json.dumps(report, indent=2) + "\n")


def _to_draw(choice: Choice, configured: Ranks, gpu: Gpu) -> Candidate | None:
    """The fastest candidate with stages: on the configured layout, if that has any, or on all."""
    exact = [c for c in choice.reasons if c.is_exact and c.problem is None]
    staged = [c for c in exact if c.stages and c.fits(gpu.budget)]
    own = [c for c in staged if c.ranks == configured]
    return min(own or staged, key=lambda c: c.seconds.total, default=None)


def _draw(path: str, config: RunConfig, work: Workload, drawn: Candidate, gpu: Gpu) -> None:
    """The first waves of an iteration on the stages, rewards and the update left out."""
    ranks, steps = drawn.ranks, work.sampled_steps
    batch = batches_of(config)(ranks)
    times = stage_times(work, batch, drawn.recompute, ranks, gpu)
    flight = batch.waves_in_flight
    windows = [trained_windows(work, drawn.schedule, batch.wave_size)] * flight
    first_step, *_ = phases("rollout", ranks.pipeline, 1, windows)
    panels = {"rollout, step by step": [simulate(first_step, times)] * steps}
    for name in ("rollout", base_of(work, drawn.schedule)):
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
    layouts = possible_layouts(config, work, gpu, gpus, stages_to_try(config))
    if not layouts:
        below, above = range(gpus, 0, -1), range(gpus, MOST_GPUS + 1)
        nearest = (
            next((n for n in numbers if possible_layouts(config, work, gpu, n)), None)
            for numbers in (below, above)
        )
        near = " or ".join(str(n) for n in nearest if n is not None)
        grpo = config.grpo
        raise ValueError(
            f"--gpus = {gpus}: no tensor-parallel size that divides the {work.shape.heads} heads "
            f"leaves data-parallel ranks among which {grpo.prompts_per_iteration} prompts x "
            f"{grpo.group_size} samples in {grpo.updates_per_rollout} updates can be dealt; "
            f"nearest valid: {near}"
        )
    return layouts


def stages_to_try(config: RunConfig) -> list[int]:
    """Sizes of pipelines that a run could have instead of its own, and that one."""
    return sorted({*_STAGES, config.parallel.pipeline_model_parallel_size})


def possible_layouts(
    config: RunConfig, work: Workload, gpu: Gpu, gpus: int, stages: Sequence[int] = (1,)
) -> list[Ranks]:
    """Layouts of some GPUs that a run could have, by its heads, blocks and groups."""
    grpo, layouts = config.grpo, []
    blocks = len(work.shape.kinds)
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
