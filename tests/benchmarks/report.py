# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What the benchmarks leave behind: tables on the console, a JSON file and a picture."""

import json
import platform as machine
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_leangrpo.files import atomic_path, atomic_write
from megatron_leangrpo.reporting.console import Console
from megatron_leangrpo.reporting.sentences import byte_size
from tests.benchmarks.cases import Case
from tests.benchmarks.measure import Figure, Measurement, quartiles

_GREY, _LIGHT, _BLUE = "#9aa0a6", "#dadce0", "#1a73e8"


@dataclass(frozen=True)
class CaseReport:
    """The measurements and figures of one case."""

    case: Case
    measured: list[Measurement]
    figures: list[Figure]


def print_case(console: Console, report: CaseReport) -> None:
    """Print seconds, gradients and memory, and then the figures."""
    repeat = len(report.measured[0].seconds)
    console.table(
        ["", "seconds", "quartiles", "range", "gradient error", "activations", "gradient",
         "moments"],
        [
            [
                m.contestant.name,
                f"{m.median:.3f}",
                _interval(quartiles(m.seconds), 3),
                _interval((min(m.seconds), max(m.seconds)), 3),
                f"{m.rel_error:.1e}",
                byte_size(m.peak_activation_bytes),
                byte_size(m.gradient_bytes),
                byte_size(m.moment_bytes),
            ]
            for m in report.measured
        ],
        f"{report.case}: medians of {repeat} interleaved rounds, peak bytes of a rank",
    )  # fmt: skip
    console.table(
        ["", "times faster", "quartiles", "FLOP ceiling", "should reach", "", "faster baseline"],
        [
            [
                f"{f.schedule} against {f.baseline}",
                f"{f.ratio:.2f}",
                _interval(f.quartiles, 2),
                f"{f.target.ceiling:.2f}",
                f"{f.target.threshold:.2f}",
                "yes" if f.reached else "no",
                f.against,
            ]
            for f in report.figures
        ],
    )
    console.line()


def _interval(ends: tuple[float, float], digits: int) -> str:
    return f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}"


def write_json(path: Path, reports: Sequence[CaseReport]) -> None:
    """Write everything that was measured, and on what."""
    content = {
        "settings": {
            "recipe": reports[0].case.recipe,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "machine": machine.processor() or machine.machine(),
            "allocator": "keeps what is freed (glibc does not trim, and maps no blocks)",
            "counted": "rollout and update; not texts, pictures, rewards or an optimizer step",
        },
        "cases": [_case_to_json(report) for report in reports],
    }
    atomic_write(path, json.dumps(content, indent=2) + "\n")


def _case_to_json(report: CaseReport) -> dict[str, Any]:
    runs = {}
    for m in report.measured:
        values = {key: value for key, value in vars(m).items() if key != "contestant"}
        values["median"], values["quartiles"] = m.median, quartiles(m.seconds)
        values["forward_equivalents"] = report.case.forwards(m.contestant.cost)
        runs[m.contestant.name] = values
    figures = [{**asdict(figure), "reached": figure.reached} for figure in report.figures]
    return {"case": asdict(report.case), "runs": runs, "figures": figures}


def draw(path: Path, reports: Sequence[CaseReport], title: str) -> None:
    """Draw seconds and bytes as horizontal bars, a group of bars a case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    bars = sum(len(report.measured) for report in reports) + 2 * len(reports)
    picture = Picture(figsize=(13, 1.2 + 0.36 * bars), layout="constrained", facecolor="white")
    FigureCanvasAgg(picture)
    picture.suptitle(title, fontsize=13, x=0.01, ha="left")
    grid = picture.subplots(
        len(reports), 2, squeeze=False, width_ratios=(3, 2),
        height_ratios=[len(report.measured) for report in reports],
    )  # fmt: skip
    for report, (seconds, memory) in zip(reports, grid):
        _draw_seconds(seconds, report)
        _draw_memory(memory, report)
    with atomic_path(path) as temporary:
        picture.savefig(temporary, dpi=120)


def _draw_seconds(axes: Any, report: CaseReport) -> None:
    labels, schedules = _labels(report), report.case.schedules
    medians = [m.median for m in report.measured]
    ends = [quartiles(m.seconds) for m in report.measured]
    spread = [
        [max(0.0, m - e[0]) for m, e in zip(medians, ends)],
        [max(0.0, e[1] - m) for m, e in zip(medians, ends)],
    ]
    colors = [_BLUE if label in schedules else _GREY for label in labels]
    axes.barh(labels, medians, color=colors, xerr=spread, ecolor="#3c4043", capsize=2)
    for label, measurement in zip(labels, report.measured):
        ratios = [
            f"{f.ratio:.2f}x against {f.baseline}" for f in report.figures if f.schedule == label
        ]
        text = f"{measurement.median:.2f} s"
        if ratios:
            text = f"{text}, {', '.join(ratios)}"
        top = quartiles(measurement.seconds)[1]
        axes.annotate(text, (top, label), xytext=(5, 0), textcoords="offset points",
                      va="center", fontsize=8)  # fmt: skip
    axes.set_xlim(0, 1.5 * max(third for _, third in ends))
    _style(axes, f"seconds of an iteration, with quartiles\n{report.case}")


def _draw_memory(axes: Any, report: CaseReport) -> None:
    labels, start = _labels(report), [0.0] * len(report.measured)
    parts = {
        "activations": ("peak_activation_bytes", _BLUE),
        "gradient buffers": ("gradient_bytes", _GREY),
        "moment buffers": ("moment_bytes", _LIGHT),
    }
    for name, (key, color) in parts.items():
        sizes = [getattr(m, key) / 2**20 for m in report.measured]
        axes.barh(labels, sizes, left=start, color=color, label=name)
        start = [a + b for a, b in zip(start, sizes)]
    axes.tick_params(labelleft=False)
    axes.legend(fontsize=8, frameon=False)
    _style(axes, "peak MiB of a rank")


def _labels(report: CaseReport) -> list[str]:
    return [m.contestant.name for m in report.measured]


def _style(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
