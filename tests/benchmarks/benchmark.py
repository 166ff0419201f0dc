# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""One case from its contestants to its tables, and what the run leaves on disk."""

import argparse
import ctypes
from collections.abc import Sequence
from pathlib import Path

from megatron_leangrpo import platform
from megatron_leangrpo.reporting.console import Console
from tests.benchmarks.cases import Case
from tests.benchmarks.contestants import Contestant
from tests.benchmarks.measure import (
    Measurement,
    estimate_seconds,
    figures,
    prepare,
    time_interleaved,
)
from tests.benchmarks.profiling import explain
from tests.benchmarks.report import CaseReport, draw, print_case, write_json

# Of the whole gradient, in float32 and another order of operations. Measured: below 1e-6.
TOLERANCE = 1e-5


# Parameters of mallopt in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Make glibc keep what is freed, as CUDA's caching allocator does.

    It gives large blocks back at every free and the kernel clears them at every use, which would
    charge whoever holds much memory at once.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_MMAP_MAX, 0)


def run_case(
    case: Case,
    contestants: Sequence[Contestant],
    exact: str,
    arguments: argparse.Namespace,
    console: Console,
) -> CaseReport:
    """Prepare, check and time the contestants; errors are against the gradient of `exact`."""
    seconds = estimate_seconds(case, contestants, arguments.repeat)
    console.line(f"{case}: about {seconds / 60:.1f} minutes")
    runs = len(contestants) * (arguments.repeat + 1)
    with console.progress("measuring", runs) as advance:
        measured = prepare(contestants, exact, advance)
        _check_gradients(measured)
        time_interleaved(measured, arguments.repeat, advance)
    report = CaseReport(case, measured, figures(case, measured))
    print_case(console, report)
    if arguments.profile:
        explain(console, contestants, [f for f in report.figures if f.far_below_ceiling])
    return report


def _check_gradients(measured: Sequence[Measurement]) -> None:
    """Refuse to time contestants that compute something else; jagg alone approximates."""
    wrong = {
        m.contestant.name: m.rel_error
        for m in measured
        if m.contestant.cost != "jagg" and not m.rel_error < TOLERANCE
    }
    if wrong:
        raise RuntimeError(f"gradients differ, relative L2: {wrong}")


def save(
    console: Console, reports: Sequence[CaseReport], folder: Path, name: str, title: str
) -> None:
    """Write the JSON file and the picture on the logging rank."""
    if not platform.is_logging_rank():
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", reports)
    draw(folder / f"{name}.png", reports, title)
    console.line(f"written: {folder / name}.json and .png")
