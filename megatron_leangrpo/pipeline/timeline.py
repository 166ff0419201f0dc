# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A picture of a pipeline: what each stage does when, one panel a schedule."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_leangrpo.files import atomic_path
from megatron_leangrpo.pipeline.simulator import Timeline

# One colour a trajectory; a backward is darker and hatched.
_COLOURS = ("#1a73e8", "#e8710a", "#188038", "#9334e6", "#d01884", "#12858d", "#b06000", "#5f6368")


def save_timeline(
    path: str | os.PathLike[str],
    panels: Mapping[str, Sequence[Timeline]],
    title: str,
    unit: str = "forwards of a stage",
) -> None:
    """Draw the phases of each panel one after the other, all panels on one time axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stages = max(len(timeline.spans) for phases in panels.values() for timeline in phases)
    longest = max(sum(t.makespan for t in phases) for phases in panels.values())
    height = 0.9 + len(panels) * (0.6 + 0.22 * stages)
    figure = Figure(figsize=(11, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, x=0.01, ha="left")
    axes_of = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, phases) in zip(axes_of, panels.items()):
        end = sum(timeline.makespan for timeline in phases)
        busy = sum(timeline.busy for timeline in phases) / len(phases[0].spans)
        axes.set_title(f"{name}: {end:.3g}, of which {1 - busy / end:.0%} idle", loc="left")
        _draw(axes, phases)
        axes.set_xlim(0, longest * 1.01)
    axes_of[-1].set_xlabel(f"time in {unit}; hatched: backwards; colours: trajectories")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110)


def _draw(axes: Any, phases: Sequence[Timeline]) -> None:
    begin, stages = 0.0, len(phases[0].spans)
    for timeline in phases:
        bars: dict[tuple[int, int, bool], list[tuple[float, float]]] = {}
        for own in timeline.spans:
            for span in own:
                operation = span.operation
                colour = operation.item.trajectory % len(_COLOURS)
                key = span.stage, colour, operation.kind == "backward"
                bars.setdefault(key, []).append((begin + span.start, span.end - span.start))
        for (stage, colour, backward), own_bars in bars.items():
            axes.broken_barh(
                own_bars,
                (stage - 0.42, 0.84),
                facecolor=_COLOURS[colour],
                alpha=1.0 if backward else 0.6,
                hatch="////" if backward else None,
                edgecolor="white",
                linewidth=0.4,
            )
        begin += timeline.makespan
        if timeline is not phases[-1]:
            axes.axvline(begin, color="#202124", linewidth=0.9, linestyle=":")
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.set_ylim(stages - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
