# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""curves.png: reward, gradient norm and time by phase over the iterations of a run."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_leangrpo.files import atomic_path

_BLUE, _ORANGE, _GREY = "#1a73e8", "#e8710a", "#5f6368"
_PHASES = {"rollout": "#8ab4f8", "reward": "#fdd663", "update": "#81c995"}
_MEAN_OVER = 10


def save_curves(
    path: str | os.PathLike[str],
    rows: Sequence[Mapping[str, Any]],
    evaluations: Mapping[int, float],
    title: str,
) -> None:
    """Draw the rows of metrics.jsonl and the evaluation rewards by iteration, 0 being the base."""
    # Without pyplot: no display, no global state, and about half the import time.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    figure.suptitle(title, fontsize=14, x=0.01, ha="left")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.6, 1))
    _draw_reward(figure.add_subplot(grid[0, :]), rows, evaluations)
    _draw_gradient(figure.add_subplot(grid[1, 0]), rows)
    _draw_time(figure.add_subplot(grid[1, 1]), rows)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120)


def _series(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float("nan") if row.get(key) is None else float(row[key]) for row in rows]


def _style(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="y", color="#e8eaed", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa0a6")
    axes.tick_params(colors=_GREY, labelsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def _marker(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """A line of one point is invisible without a marker."""
    return "o" if len(rows) < 3 else None


def _draw_reward(
    axes: Any, rows: Sequence[Mapping[str, Any]], evaluations: Mapping[int, float]
) -> None:
    _style(axes, "reward")
    iterations = np.array([row["iteration"] for row in rows])
    mean = np.array(_series(rows, "reward_mean"))
    spread = np.array(_series(rows, "reward_std"))
    axes.fill_between(
        iterations,
        mean - spread,
        mean + spread,
        color=_BLUE,
        alpha=0.10,
        linewidth=0,
        label="± mean standard deviation in a group",
    )
    axes.plot(
        iterations,
        mean,
        color=_BLUE,
        alpha=0.45,
        linewidth=1,
        marker=_marker(rows),
        label="rollout mean",
    )
    axes.plot(
        iterations,
        _trailing_mean(mean) if rows else mean,
        color=_BLUE,
        linewidth=2.2,
        label=f"mean of the last {_MEAN_OVER} iterations",
    )
    points = sorted(evaluations.items())
    axes.plot(
        [iteration for iteration, _ in points],
        [reward for _, reward in points],
        color=_ORANGE,
        marker="o",
        markersize=6,
        linewidth=1.6,
        label="evaluation (fixed noise, no exploration)",
    )
    for iteration, reward in (points[0], points[-1]) if len(points) > 1 else points:
        axes.annotate(
            f"{reward:.2f}",
            (iteration, reward),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            color=_ORANGE,
            fontsize=10,
            fontweight="bold",
        )
    axes.set_xlabel("iteration", color=_GREY, fontsize=9)
    axes.legend(loc="lower right", fontsize=9, frameon=False)


def _draw_gradient(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    _style(axes, "gradient norm before clipping")
    axes.plot(
        [row["iteration"] for row in rows],
        _series(rows, "grad_norm"),
        color=_BLUE,
        linewidth=1.4,
        marker=_marker(rows),
    )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("iteration", color=_GREY, fontsize=9)


def _draw_time(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    _style(axes, "seconds an iteration")
    if not rows:
        return
    iterations = np.array([row["iteration"] for row in rows])
    edges = np.append(iterations - 0.5, iterations[-1] + 0.5)
    bottom = np.zeros(len(iterations))
    for name, color in _PHASES.items():
        top = bottom + np.nan_to_num(_series(rows, f"time_{name}"))
        axes.stairs(top, edges, baseline=bottom, fill=True, color=color, label=name)
        bottom = top
    # Room for the legend; a first iteration that warms everything up may leave the picture.
    axes.set_ylim(0, 1.3 * min(bottom.max(), 2 * np.median(bottom)) or 1.0)
    axes.set_xlabel("iteration", color=_GREY, fontsize=9)
    axes.legend(loc="upper right", fontsize=9, frameon=False, ncols=len(_PHASES))


def _trailing_mean(values: np.ndarray) -> np.ndarray:
    """Mean of up to the last 10 values at each place, over those that are numbers."""
    known = np.isfinite(values)
    window = np.ones(_MEAN_OVER)
    count = np.convolve(known, window)[: len(values)]
    total = np.convolve(np.where(known, values, 0.0), window)[: len(values)]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
