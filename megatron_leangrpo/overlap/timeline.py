# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A picture of an overlapped layer: who computes and who sends when, one panel a mode."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_leangrpo.files import atomic_path
from megatron_leangrpo.overlap.simulator import Span

# One colour a slice, so that a slice can be followed from rank to rank.
_COLOURS = ("#1a73e8", "#e8710a", "#188038", "#9334e6", "#d01884", "#12858d", "#b06000", "#5f6368")
_LANES = {"compute": 0, "add": 0, "send": 1, "collective": 1}
_MOST_RANKS = 8


def save_timeline(
    path: str | os.PathLike[str],
    modes: Mapping[str, Sequence[Span]],
    compute_total: float,
    title: str,
) -> None:
    """Draw the spans of each mode on one time axis; `compute_total` is where it cannot be better.

    Of many ranks the first eight are drawn.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = min(_MOST_RANKS, 1 + max(span.rank for spans in modes.values() for span in spans))
    longest = max(span.end for spans in modes.values() for span in spans)
    height = 0.9 + len(modes) * (0.7 + 0.36 * ranks)
    figure = Figure(figsize=(11, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, x=0.01, ha="left")
    panels = figure.subplots(len(modes), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, spans) in zip(panels, modes.items()):
        _draw(axes, [span for span in spans if span.rank < ranks], ranks)
        end = max(span.end for span in spans)
        axes.axvline(compute_total, color="#202124", linewidth=0.9, linestyle=":")
        axes.axvspan(compute_total, end, color="#d93025", alpha=0.10, linewidth=0)
        axes.set_title(
            f"{name}: {end - compute_total:.1f} ms exposed, {end:.1f} ms", loc="left", fontsize=11
        )
        axes.set_xlim(0, longest * 1.01)
    panels[-1].set_xlabel("ms; upper bar of a rank: products, lower bar: what it sends", fontsize=9)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120)


def _draw(axes: Any, spans: Sequence[Span], ranks: int) -> None:
    for span in spans:
        colour = _COLOURS[span.slice % len(_COLOURS)]
        lane = _LANES[span.kind]
        computes = span.kind == "compute"
        axes.barh(
            span.rank + (0.22 if lane else -0.22),
            span.end - span.start,
            left=span.start,
            height=0.4 if lane == 0 else 0.3,
            color="#202124" if span.kind == "add" else colour,
            alpha=1.0 if lane == 0 else 0.55,
            hatch=None if lane == 0 else "////",
            edgecolor="white",
            linewidth=0.5,
        )
        if computes and span.end - span.start > 0.03 * axes.get_xlim()[1]:
            axes.text(
                (span.start + span.end) / 2,
                span.rank - 0.22,
                str(span.slice),
                ha="center",
                va="center",
                fontsize=7,
                color="white",
            )
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylim(ranks - 0.45, -0.55)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
