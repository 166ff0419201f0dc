# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What `leangrpo plan` prints and writes: a short table, the reasons, and everything as JSON."""

from dataclasses import asdict, replace
from typing import Any

from megatron_leangrpo.pipeline.bubbles import few_trajectories
from megatron_leangrpo.planner.gpus import GIB, Gpu
from megatron_leangrpo.planner.pipelining import StagePlan
from megatron_leangrpo.planner.selector import (
    SCHEDULES,
    Candidate,
    Choice,
    forward_cost_line,
    name_of,
)
from megatron_leangrpo.planner.splitting import split_of
from megatron_leangrpo.planner.workload import Ranks, Workload
from megatron_leangrpo.reporting.console import Console
from megatron_leangrpo.reporting.sentences import number

_ROWS_PER_SCHEDULE = 3


def print_plan(console: Console, title: str, choice: Choice, work: Workload, gpu: Gpu) -> None:
    """Print the chosen row, the best rows of each schedule, and why."""
    rows = _shown(choice)
    console.table(
        ["schedule", "layout", "memory a GPU", "s/iteration", "samples/s", "verdict"],
        [_row(candidate, choice, gpu) for candidate in rows],
        title=title,
    )
    console.line()
    console.line(f"chosen: {label(choice.chosen)}, {choice.reasons[choice.chosen]}")
    for line in _explanations(choice, work, gpu):
        console.line(line)


def configured_lines(
    found: Choice | ValueError, ranks: Ranks, work: Workload, gpu: Gpu
) -> list[str]:
    """What the configured layout would get, where another one was chosen."""
    setting = f"on {ranks}, as configured"
    if isinstance(found, ValueError):
        return [f"{setting}: {found}"]
    chosen = found.chosen
    line = (
        f"{setting}: {name_of(chosen)}, {found.reasons[chosen]}, "
        f"{number(chosen.seconds.total)} s an iteration"
    )
    return [line, *_stage_lines(chosen, work, gpu)]


def _stage_lines(candidate: Candidate, work: Workload, gpu: Gpu) -> list[str]:
    """How a layout with pipeline stages is split, and what it waits for."""
    stages, ranks = candidate.stages, candidate.ranks
    if not stages:
        return []
    lines = [
        f"stages: {len(stages)} of {' + '.join(str(stage.blocks) for stage in stages)} blocks, "
        f"{candidate.waves_in_flight} waves in flight, waiting {candidate.seconds.idle:.1%} of the "
        f"time; memory {', '.join(f'{stage.memory.total / GIB:.1f}' for stage in stages)} GiB"
    ]
    times = [stage.forward + stage.backward for stage in stages]
    uneven = max(times) * len(times) / sum(times) - 1
    if uneven > 0.02:
        slowest, own = times.index(max(times)), tuple(stage.blocks for stage in stages)
        even = split_of(replace(work, pipeline_split=None), ranks, gpu)
        advice = "no other cut" if even == own else f"parallel.pipeline_split = {list(even)}"
        lines.append(
            f"  stage {slowest} is {uneven:.0%} slower than the mean of the stages, which wait for "
            f"it: {advice} is more even on {gpu.name}"
        )
    flight = candidate.waves_in_flight
    rings = candidate.waves, flight
    few = few_trajectories(candidate.schedule, ranks.pipeline, *rings, candidate.steps)
    if few is not None:
        lines.append(f"  warning: {few} (parallel.pipeline_waves_in_flight)")
    return lines


def to_json(choice: Choice, work: Workload, gpu: Gpu, settings: dict[str, Any]) -> dict[str, Any]:
    """Every candidate with its parts, in the order of the seconds."""
    return {
        "gpu": {**asdict(gpu), "budget": gpu.budget},
        "chosen": _candidate_json(choice.chosen, choice, gpu),
        "candidates": [_candidate_json(c, choice, gpu) for c in _by_speed(choice)],
        "workload": asdict(work),
        "settings": settings,
    }


def _candidate_json(candidate: Candidate, choice: Choice, gpu: Gpu) -> dict[str, Any]:
    return {
        "schedule": candidate.schedule,
        "recompute_granularity": candidate.recompute,
        "tensor_model_parallel_size": candidate.ranks.tensor,
        "context_parallel_size": candidate.ranks.context,
        "pipeline_model_parallel_size": candidate.ranks.pipeline,
        "data_parallel_size": candidate.ranks.data,
        "waves_in_flight": candidate.waves_in_flight,
        "stages": [_stage_json(stage) for stage in candidate.stages],
        "memory_bytes": {**asdict(candidate.memory), "total": candidate.memory.total},
        "seconds": {**asdict(candidate.seconds), "total": candidate.seconds.total},
        "samples_per_second": candidate.samples_per_second,
        "forward_equivalents": candidate.forward_equivalents,
        "exact": candidate.is_exact,
        "fits": candidate.fits(gpu.budget),
        "chosen": candidate is choice.chosen,
        "reason": choice.reasons[candidate],
    }


def _stage_json(stage: StagePlan) -> dict[str, Any]:
    return {
        "blocks": stage.blocks,
        "memory_bytes": {**asdict(stage.memory), "total": stage.memory.total},
        "forward_seconds": stage.forward,
        "backward_seconds": stage.backward,
    }


def _by_speed(choice: Choice) -> list[Candidate]:
    return sorted(choice.reasons, key=lambda c: (c.seconds.total, c.memory.total))


def _shown(choice: Choice) -> list[Candidate]:
    """The chosen row, then the rows of each schedule: runnable ones by speed, else the smallest."""
    shown = [choice.chosen]
    for schedule in SCHEDULES:
        own = [c for c in _by_speed(choice) if c.schedule == schedule and c is not choice.chosen]
        runnable = [c for c in own if _runs(c, choice)]
        # What does not fit is of interest where it would be faster than what does.
        rest = [c for c in own if c not in runnable and c.problem is None]
        near = sorted(rest, key=lambda c: c.memory.total)
        count = max(1, _ROWS_PER_SCHEDULE - len(runnable))
        shown += runnable[:_ROWS_PER_SCHEDULE] + near[:count]
        if not runnable and not near:
            shown += own[:1]
    return shown


def _runs(candidate: Candidate, choice: Choice) -> bool:
    return candidate.problem is None and not choice.reasons[candidate].startswith("does not fit")


def _row(candidate: Candidate, choice: Choice, gpu: Gpu) -> list[str]:
    verdict = "chosen" if candidate is choice.chosen else _short(choice.reasons[candidate])
    return [
        name_of(candidate),
        str(candidate.ranks),
        f"{candidate.memory.total / GIB:.1f} GiB",
        number(candidate.seconds.total),
        number(candidate.samples_per_second),
        verdict,
    ]


def _short(reason: str) -> str:
    """A verdict for the table; the whole sentence stands below it."""
    return reason.split(";")[0].split(":")[0].split(" (")[0]


def label(candidate: Candidate) -> str:
    """The schedule and the layout."""
    return f"{name_of(candidate)} on {candidate.ranks}"


def _explanations(choice: Choice, work: Workload, gpu: Gpu) -> list[str]:
    """A line a schedule on the chosen layout: its cost, and the sentence that goes with it."""
    lines = []
    chosen = choice.chosen
    for schedule in SCHEDULES:
        same = [
            c
            for c in _by_speed(choice)
            if c.schedule == schedule and c is not chosen and c.ranks == chosen.ranks
        ]
        lines += [f"  {name_of(c)} there: {choice.reasons[c]}" for c in same]
    lines += _stage_lines(chosen, work, gpu)
    lines.append(f"parts of the memory: {_parts(chosen)}")
    lines.append(forward_cost_line(work))
    return lines


def _parts(candidate: Candidate) -> str:
    parts = asdict(candidate.memory)
    names = {name: name.replace("_", " ") for name in parts}
    return ", ".join(f"{names[name]} {size / GIB:.1f} GiB" for name, size in parts.items() if size)
