# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""One rollout with fixed seeds under each schedule: gradient error, seconds and peak memory."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.grpo.data_parallel import zero_gradients
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.grpo.iteration import IterationRunner
from megatron_leangrpo.grpo.memory import peak_allocated_bytes
from megatron_leangrpo.grpo.schedules import SCHEDULE_NAMES

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ScheduleReport:
    """One row of the comparison; times are medians in seconds, of the slowest rank."""

    rel_error: float
    """Relative L2 distance of the whole gradient from the baseline's."""
    cosine: float
    worst_tensor: str
    """The tensor with the largest relative L2 distance, and that distance."""
    worst_rel_error: float
    time_rollout: float
    time_reward: float
    time_update: float
    time_total: float
    peak_activation_bytes: int
    """Highest rise of allocated bytes during the iteration, on the rank with the most; without the
    buffers below."""
    gradient_buffer_bytes: int
    """Buffers that collect the gradient, under every schedule."""
    moment_buffer_bytes: int
    """Copies of them that reweight needs at once."""
    ratio_min: float
    ratio_max: float


@dataclass(frozen=True)
class Comparison:
    """The reports by schedule, and the first schedule's full gradient under diffusers' names."""

    baseline: str
    reports: dict[str, ScheduleReport]
    gradients: Gradients

    def to_json(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the documented JSON form."""
        rows = {name: asdict(report) for name, report in self.reports.items()}
        return {"baseline": self.baseline, "schedules": rows, "settings": settings}


def compare_schedules(
    experiment: Experiment,
    schedules: Sequence[str],
    repeat: int,
    advance: Callable[[int], None] = lambda count: None,
) -> Comparison:
    """Run the first iteration under each schedule without updating the weights (a collective).

    A first run of each allocates what stays allocated and scores jagg's windows, a second counts
    memory and keeps the gradient, `repeat` interleaved runs are timed. The error is against replay,
    or against the first schedule where replay is not among them.
    """
    runners = {name: experiment.runner(name) for name in schedules}
    gradients: dict[str, Gradients] = {}
    ratios: dict[str, tuple[float, float]] = {}
    peaks = {}
    for name, runner in runners.items():
        _run(runner, experiment)
        metrics: dict[str, float] = {}
        peaks[name] = peak_allocated_bytes(
            lambda r=runner, m=metrics: m.update(_run(r, experiment))
        )
        gradients[name] = experiment.architecture.export_gradients(experiment.model)
        ratios[name] = (metrics["ratio_min"], metrics["ratio_max"])
        advance(1)
    times: dict[str, list[dict[str, float]]] = {name: [] for name in schedules}
    for _ in range(repeat):
        for name, runner in runners.items():
            times[name].append(_run(runner, experiment))
            advance(1)
    zero_gradients(experiment.model)

    baseline = "replay" if "replay" in schedules else schedules[0]
    reports = {}
    for name in schedules:
        errors = gradient_errors(gradients[name], gradients[baseline])
        phases = ("time_rollout", "time_reward", "time_update", "time_total")
        seconds = {p: statistics.median(run[p] for run in times[name]) for p in phases}
        buffers = runners[name].schedule.buffers
        sizes = (peaks[name], buffers.num_bytes, buffers.copies_num_bytes)
        slowest = _largest([*seconds.values(), *sizes])
        reports[name] = ScheduleReport(
            **errors,
            **dict(zip(phases, slowest)),
            peak_activation_bytes=int(slowest[-3]),
            gradient_buffer_bytes=int(slowest[-2]),
            moment_buffer_bytes=int(slowest[-1]),
            ratio_min=ratios[name][0],
            ratio_max=ratios[name][1],
        )
    return Comparison(baseline, reports, gradients[schedules[0]])


def gradient_errors(gradients: Gradients, baseline: Gradients) -> dict[str, Any]:
    """Relative L2 distance and cosine of two full gradients, and the tensor that is worst."""
    difference = norm = product = own = 0.0
    worst, worst_error = "", 0.0
    for name, reference in baseline.items():
        reference, value = reference.double(), gradients[name].double()
        delta = (value - reference).square().sum().item()
        size = reference.square().sum().item()
        error = (delta / size) ** 0.5 if size else float(delta > 0)
        if error >= worst_error:
            worst, worst_error = name, error
        difference, norm = difference + delta, norm + size
        product += (value * reference).sum().item()
        own += value.square().sum().item()
    cosine = product / (own * norm) ** 0.5 if own and norm else float(own == norm)
    return {
        "rel_error": (difference / norm) ** 0.5 if norm else float(difference > 0),
        "cosine": cosine,
        "worst_tensor": worst,
        "worst_rel_error": worst_error,
    }


def check_comparison(schedules: Sequence[str], repeat: int) -> None:
    """Raise ``ValueError`` for a schedule that is not known, or nothing to time."""
    unknown = [name for name in schedules if name not in SCHEDULE_NAMES]
    if unknown or not schedules:
        valid = ",".join(SCHEDULE_NAMES)
        raise ValueError(f"--schedules = {','.join(schedules)!r}; valid: {valid}")
    if repeat < 1:
        raise ValueError(f"--repeat = {repeat} must be at least 1")


def _run(runner: IterationRunner, experiment: Experiment) -> dict[str, float]:
    return runner.run(0, experiment.sampler.batch(0)).metrics


def _largest(values: Sequence[float]) -> list[float]:
    """Take the maximum of each value over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=platform.device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()
