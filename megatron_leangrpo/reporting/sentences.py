# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The sentences of a run: one an iteration, one for an evaluation, one at the end."""

from collections.abc import Mapping
from typing import Any


def iteration_line(iteration: int, iterations: int, metrics: Mapping[str, Any]) -> str:
    """Return the line of one iteration from its metrics."""
    width = len(str(iterations))
    took = f"{seconds(metrics['time_total'])} ({_phases(metrics)})"
    parts = [
        f"iteration {iteration:{width}}/{iterations}",
        f"reward {number(metrics['reward_mean'])} ± {number(metrics['reward_std'])}",
        *_rewards(metrics),
        f"grad {number(metrics['grad_norm'])}",
        *_off_policy(metrics),
        took,
        f"{number(metrics['samples_per_second'])} images/s",
    ]
    if metrics.get("mfu") is not None:
        parts.append(f"{percent(metrics['mfu'])} MFU")
    if metrics["zero_std_ratio"] > 0:
        parts.insert(parts.index(took), f"{percent(metrics['zero_std_ratio'])} of groups constant")
    return "  ".join(parts)


def evaluation_line(iteration: int, reward: float, correct: float | None, verdict: str) -> str:
    """Return the line of one evaluation; `verdict` is what `correct` counts ("read correctly")."""
    share = "" if correct is None else f", {percent(correct)} {verdict}"
    return f"evaluation after iteration {iteration}: reward {number(reward)}{share}"


def final_line(summary: Mapping[str, Any], samples: str) -> str:
    """Return the one line that tells a person what the run has achieved.

    Reads eval_reward_before and _after, seconds and, where the reward can tell right from wrong,
    eval_correct_before and _after (shares) and correct_means ("read correctly").
    """
    rewards = summary["eval_reward_before"], summary["eval_reward_after"]
    # Two decimals say nothing of a reward that is a file size in megabytes.
    shown = [f"{r:.2f}" if max(map(abs, rewards)) >= 0.1 else number(r) for r in rewards]
    parts = [f"reward {shown[0]} -> {shown[1]}"]
    before, after = summary.get("eval_correct_before"), summary.get("eval_correct_after")
    if before is not None and after is not None:
        meaning = summary.get("correct_means", "correct")
        parts.append(f"{percent(before)} -> {percent(after)} {meaning}")
    parts.append(seconds(summary["seconds"]))
    return f"{', '.join(parts)}; pictures in {samples}"


def number(value: float | None) -> str:
    """Three significant digits, without an exponent where one can do without."""
    if value is None:
        return "-"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    if 0 < abs(value) < 0.1:
        return f"{value:.3g}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def percent(share: float) -> str:
    """0.63 is 63 %."""
    return f"{100 * share:.0f} %"


def seconds(value: float) -> str:
    """Seconds, minutes or hours, whichever a person would say."""
    if value < 10:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.0f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


def byte_size(value: float) -> str:
    """Bytes in the largest binary unit that leaves a number of at least one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _rewards(metrics: Mapping[str, Any]) -> list[str]:
    names = [key for key in metrics if key.startswith("reward_")]
    names = [key for key in names if key not in ("reward_mean", "reward_std")]
    # A single reward is the total already.
    if len(names) < 2:
        return []
    return ["(" + ", ".join(f"{key[7:]} {number(metrics[key])}" for key in names) + ")"]


def _off_policy(metrics: Mapping[str, Any]) -> list[str]:
    low, high = metrics["ratio_min"], metrics["ratio_max"]
    if low == high == 1:
        return []
    return [f"ratio {low:.4f} to {high:.4f}"]


def _phases(metrics: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {number(metrics[f'time_{name}'])}" for name in ("rollout", "reward", "update")
    )
