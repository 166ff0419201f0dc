# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Chooses a schedule: the fastest of the exact ones that fits into the memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_leangrpo.planner.gpus import GIB, Gpu
from megatron_leangrpo.planner.memory import RankMemory, base_of, rank_memory, windows
from megatron_leangrpo.planner.pipelining import StagePlan, pipeline_seconds, stage_plans
from megatron_leangrpo.planner.seconds import (
    IterationSeconds,
    forward_equivalents,
    iteration_seconds,
)
from megatron_leangrpo.planner.workload import Batch, Ranks, Workload

EXACT = ("replay", "retain", "reweight")
SCHEDULES = (*EXACT, "jagg")


@dataclass(frozen=True)
class Candidate:
    """A schedule on a layout, with what it would take."""

    schedule: str
    recompute: str
    ranks: Ranks
    memory: RankMemory
    seconds: IterationSeconds
    samples_per_second: float
    forward_equivalents: float
    """Cost of a trajectory in forwards."""
    problem: str | None = None
    """Why it cannot be run as configured, whatever the memory."""
    stages: tuple[StagePlan, ...] = ()
    """Of a pipeline; `memory` is that of the one that needs the most."""
    waves: int = 1
    waves_in_flight: int = 1
    steps: int = 1
    """N."""

    @property
    def is_exact(self) -> bool:
        """Whether its gradient is replay's."""
        return self.schedule in EXACT

    def fits(self, budget: int) -> bool:
        """Whether it stays within the memory of a device."""
        return self.memory.total <= budget


@dataclass(frozen=True)
class Choice:
    """What was chosen among candidates, and why not each of the others."""

    chosen: Candidate
    reasons: dict[Candidate, str]


def candidates(
    work: Workload,
    batch_of: Callable[[Ranks], Batch],
    layouts: Sequence[Ranks],
    gpu: Gpu,
    recompute: str,
) -> list[Candidate]:
    """Every schedule on every layout with every recomputation.

    `recompute` is the configured one; attention alone is recomputed where it says so.
    """
    found = []
    for ranks in layouts:
        batch = batch_of(ranks)
        for schedule in SCHEDULES:
            for mode in dict.fromkeys(("none", recompute, "full")):
                found.append(_candidate(work, batch, schedule, mode, ranks, gpu))
    return found


def _candidate(
    work: Workload, batch: Batch, schedule: str, recompute: str, ranks: Ranks, gpu: Gpu
) -> Candidate:
    staged = ranks.pipeline > 1
    run = work, batch, schedule, recompute, ranks
    stages = stage_plans(*run, gpu) if staged else ()
    seconds = pipeline_seconds(*run, gpu) if staged else iteration_seconds(*run, gpu)
    return Candidate(
        schedule=schedule,
        recompute=recompute,
        ranks=ranks,
        memory=max((stage.memory for stage in stages), key=lambda m: m.total)
        if staged
        else rank_memory(*run),
        seconds=seconds,
        samples_per_second=work.samples / seconds.total,
        forward_equivalents=forward_equivalents(work, schedule, recompute, reference=False),
        problem=_problem(work, schedule),
        stages=stages,
        waves=batch.waves,
        waves_in_flight=batch.waves_in_flight,
        steps=work.sampled_steps,
    )


def _problem(work: Workload, schedule: str) -> str | None:
    if base_of(work, schedule) == "reweight" and work.micro_batch != 1:
        return (
            "takes one trajectory at a time: needs grpo.micro_batch_size = 1, "
            f"which is {work.micro_batch}"
        )
    if schedule == "jagg" and not windows(work)[0]:
        return "has no window to approximate: " + (
            "the trained steps are drawn one by one (set sampling.block_size)"
            if work.steps_chosen_singly
            else "grpo.jagg_window, grpo.jagg_frac and the trained steps leave none of 3 or more"
        )
    return None


def choose(work: Workload, found: Sequence[Candidate], budget: int, device: str) -> Choice:
    """Take the fastest exact candidate within `budget` bytes.

    Raises ``ValueError`` where nothing fits, naming the least memory that would do.
    """
    usable = [c for c in found if c.is_exact and c.problem is None]
    fitting = [c for c in usable if c.fits(budget)]
    if not fitting:
        raise ValueError(_nothing_fits(usable, budget, device))
    chosen = min(fitting, key=lambda c: (c.seconds.total, c.memory.total))
    reasons = {c: _reason(work, c, chosen, budget) for c in found if c is not chosen}
    return Choice(chosen, {chosen: _why(chosen, fitting, usable, budget), **reasons})


def name_of(candidate: Candidate) -> str:
    """The schedule, and the recomputation where there is any."""
    if candidate.recompute == "none":
        return candidate.schedule
    what = "attention" if candidate.recompute == "selective" else "blocks"
    return f"{candidate.schedule}, {what} recomputed"


def _why(
    chosen: Candidate, fitting: Sequence[Candidate], usable: Sequence[Candidate], budget: int
) -> str:
    same_layout = _on_layout_of(chosen, usable)
    text = (
        f"the fastest exact schedule that fits: {chosen.memory.total / GIB:.1f} of "
        f"{budget / GIB:.1f} GiB"
    )
    faster = [c for c in same_layout if c.seconds.total < chosen.seconds.total]
    if faster:
        best = min(faster, key=lambda c: c.seconds.total)
        text += f"; {name_of(best)} would be faster but {_missing(best, budget)}"
    others = [c for c in same_layout if c.schedule == "replay" and c in fitting]
    if chosen.stages:
        text += f"; its stages wait for {chosen.seconds.idle:.1%} of the time"
    if chosen.schedule != "replay" and others:
        replay = min(others, key=lambda c: c.seconds.total)
        gain = replay.seconds.total / chosen.seconds.total
        text += f"; {gain:.2f} times as fast as {name_of(replay)}"
    return text


def _reason(work: Workload, candidate: Candidate, chosen: Candidate, budget: int) -> str:
    if candidate.problem is not None:
        return candidate.problem
    if not candidate.fits(budget):
        return _missing(candidate, budget)
    ratio = candidate.seconds.total / chosen.seconds.total
    if not candidate.is_exact:
        speed = f"{1 / ratio:.2f} times as fast" if ratio < 1 else f"{_slower(ratio)}"
        return f"approximate, {speed}; never chosen by itself (grpo.schedule = jagg)"
    reason = _slower(ratio)
    if candidate.stages:
        reason += f", its stages wait for {candidate.seconds.idle:.1%} of the time"
    if candidate.schedule == "reweight" and work.kl:
        backward = 2 if work.trainable is None else 1
        reason += (
            ": the KL term needs a backward of its own "
            f"({1 + 2 * backward} forwards a trained step against {2 + backward} for replay)"
        )
    return reason


def _slower(ratio: float) -> str:
    share = 100 * (ratio - 1)
    return f"slower by {share:.0f} %" if share >= 0.5 else "no faster"


def _missing(candidate: Candidate, budget: int) -> str:
    return f"does not fit by {(candidate.memory.total - budget) / GIB:.1f} GiB"


def _on_layout_of(chosen: Candidate, found: Sequence[Candidate]) -> list[Candidate]:
    return [c for c in found if c.ranks == chosen.ranks]


def _nothing_fits(usable: Sequence[Candidate], budget: int, device: str) -> str:
    least = min(usable, key=lambda c: c.memory.total)
    memory = least.memory
    return (
        f"no schedule fits into {budget / GIB:.1f} GiB, what a run can use of {device}: the least "
        f"is {memory.total / GIB:.1f} GiB, {name_of(least)} on {least.ranks} "
        f"({memory.activations / GIB:.1f} GiB of it activations). Take a device with more memory, "
        "more GPUs, a larger parallel.tensor_model_parallel_size, pipeline_model_parallel_size or "
        "context_parallel_size, or a smaller grpo.micro_batch_size or picture"
    )


def forward_cost_line(work: Workload) -> str:
    """What a trajectory costs under each schedule, in forwards."""
    costs = ", ".join(
        f"{name} {forward_equivalents(work, name, 'none', reference=False):g}"
        for name in SCHEDULES
        if _problem(work, name) is None
    )
    backward = "two" if work.trainable is None else "one"
    return (
        f"cost of a trajectory in forwards, {work.trained_steps} of {work.sampled_steps} steps "
        f"trained, a backward being {backward}: {costs}"
    )
