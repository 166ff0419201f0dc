# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Runs contestants interleaved: first gradients and memory, then seconds."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_leangrpo import platform
from megatron_leangrpo.grpo.compare import gradient_errors
from megatron_leangrpo.grpo.memory import allocation_changes
from tests.benchmarks.cases import Case, Target, targets
from tests.benchmarks.contestants import Contestant


@dataclass
class Measurement:
    """What one contestant took."""

    contestant: Contestant
    rel_error: float
    """Relative L2 distance of the whole gradient from our replay's."""
    cosine: float
    peak_activation_bytes: int
    """Highest rise of what an iteration allocates beside gradient-sized buffers."""
    gradient_bytes: int
    """Gradient buffers that outlive the iteration."""
    moment_bytes: int
    """Highest rise of further buffers as large as those, which only reweight has."""
    seconds: list[float] = field(default_factory=list)
    """One a round, of the slowest rank."""

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Figure:
    """How many times faster a schedule is than the faster one of the replays of one kind."""

    schedule: str
    baseline: str
    against: str
    """The contestant that was the faster baseline."""
    ratio: float
    """Of the medians."""
    quartiles: tuple[float, float]
    """Of the ratios round by round."""
    target: Target

    @property
    def reached(self) -> bool:
        """Whether the threshold is."""
        return self.ratio >= self.target.threshold

    @property
    def far_below_ceiling(self) -> bool:
        """Whether the time must be accounted for: 7 % below what the forwards promise."""
        return self.ratio < 0.93 * self.target.ceiling


def prepare(
    contestants: Sequence[Contestant], baseline: str, advance: Callable[[int], None]
) -> list[Measurement]:
    """Run each contestant once for its gradient and its memory; no clock counts."""
    gradients: dict[str, dict[str, Tensor]] = {}
    peaks = {}
    for contestant in contestants:
        sizes = {buffer.numel() * buffer.element_size() for buffer in contestant.buffers()}
        # Sharded or per-parameter gradients have the sizes of parameters and of activations;
        # only Megatron's flat buffers are of a size that nothing else has.
        flat = sizes if len(contestant.buffers()) == 1 else set()
        peaks[contestant.name] = memory_peaks(contestant.run, flat)
        gradients[contestant.name] = contestant.gradients()
        advance(1)
    measured = []
    for contestant in contestants:
        errors = gradient_errors(gradients[contestant.name], gradients[baseline])
        activations, moments = peaks[contestant.name]
        held = sum(buffer.numel() * buffer.element_size() for buffer in contestant.buffers())
        bytes_ = [int(value) for value in largest([activations, held, moments])]
        measured.append(Measurement(contestant, errors["rel_error"], errors["cosine"], *bytes_))
    return measured


def memory_peaks(run: Callable[[], object], buffer_sizes: set[int]) -> tuple[int, int]:
    """Run something and return the highest rises of other allocations and of those sizes."""
    current, peak = [0, 0], [0, 0]
    for change in allocation_changes(run):
        kind = int(abs(change) in buffer_sizes)
        current[kind] += change
        peak[kind] = max(peak[kind], current[kind])
    return peak[0], peak[1]


def time_interleaved(
    measured: Sequence[Measurement], repeat: int, advance: Callable[[int], None]
) -> None:
    """Time every contestant once a round."""
    for _ in range(repeat):
        for measurement in measured:
            dist.barrier()
            seconds = measurement.contestant.run()
            measurement.seconds += largest([seconds])
            advance(1)


def figures(case: Case, measured: Sequence[Measurement]) -> list[Figure]:
    """Every schedule of a case against the faster contestant of each baseline."""
    found = []
    for schedule in (m for m in measured if m.contestant.name in case.schedules):
        name = schedule.contestant.name
        for baseline, target in targets(case, name).items():
            rivals = [m for m in measured if m.contestant.cost == baseline]
            rival = min(rivals, key=lambda m: m.median)
            rounds = [a / b for a, b in zip(rival.seconds, schedule.seconds, strict=True)]
            found.append(
                Figure(
                    schedule=name,
                    baseline=baseline,
                    against=rival.contestant.name,
                    ratio=rival.median / schedule.median,
                    quartiles=quartiles(rounds),
                    target=target,
                )
            )
    return found


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def estimate_seconds(case: Case, contestants: Sequence[Contestant], repeat: int) -> float:
    """About how long a case will take, from the first run of jagg, or of retain without it.

    jagg's first run must not be measured, and reweight's, which allocates its moments, must be.
    """
    by_name = {contestant.name: contestant for contestant in contestants}
    first = by_name.get("jagg", by_name["retain"])
    assert all(c.first_cost == c.cost for c in contestants if c is not first)
    forward = first.run() / case.forwards(first.first_cost)
    return forward * (repeat + 1) * sum(case.forwards(c.cost) for c in contestants)


def largest(values: Sequence[float]) -> list[float]:
    """The maximum of each value over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=platform.device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()
