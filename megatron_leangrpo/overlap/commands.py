# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The command `leangrpo overlap`: what overlapping a layer with its collective would gain."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_leangrpo.files import atomic_write
from megatron_leangrpo.overlap.compared import row_of, simulated_modes, sweep_row
from megatron_leangrpo.overlap.cost_model import Collective, Costs, exposed, messages
from megatron_leangrpo.overlap.simulator import Span, end_of
from megatron_leangrpo.overlap.timeline import save_timeline
from megatron_leangrpo.reporting.console import Console

if TYPE_CHECKING:
    from megatron_leangrpo.overlap.choice import Choice, Shape

_SWEEP = (2, 4, 8, 16, 32, 64)
_COLUMNS = ["mode", "exposed ms", "end ms", "saved"]


def simulate(
    *,
    compute_ms: float,
    collective_ms: float,
    ranks: int,
    collective: Collective,
    sub_slices: int,
    add_ms: float,
    slices: int,
    slice_cost_ms: float,
    latency_ms: float,
    json_path: str | None,
    timeline_path: str | None,
) -> None:
    """Print each mode's exposed time for one layer, and for the same layer on 2 to 64 ranks."""
    for option, value in {
        "--add-ms": add_ms,
        "--slice-cost-ms": slice_cost_ms,
        "--latency-ms": latency_ms,
    }.items():
        _check_not_negative(option, value)
    _check_layer(compute_ms, collective_ms, ranks, sub_slices, slices, most_ranks=64)
    _check_folders(json_path, timeline_path)
    count = messages(collective, ranks)
    if latency_ms > collective_ms / count:
        raise ValueError(
            f"--latency-ms is {latency_ms:g}: {count} messages of it are longer than "
            f"--collective-ms {collective_ms:g}; at most {collective_ms / count:g}"
        )
    costs = Costs.of_layer(
        ranks=ranks,
        compute=compute_ms,
        collective=collective_ms - count * latency_ms,
        latency=latency_ms,
        add=add_ms,
    )
    played = simulated_modes(costs, collective, sub_slices, slices, slice_cost_ms)
    layer = [row_of(name, played, costs) for name in played]
    sweep = [
        {"ranks": size, **sweep_row(costs, size, collective, sub_slices, slices, slice_cost_ms)}
        for size in _SWEEP
    ]
    console = Console()
    console.facts(
        f"{_beside(collective)} on {ranks} ranks",
        {
            "compute": f"{compute_ms:g} ms",
            "collective": f"{collective_ms:g} ms alone",
            "calibration inputs": f"adding one slice {add_ms:g} ms, "
            f"one collective of slicing {slice_cost_ms:g} ms, a message {latency_ms:g} ms",
        },
    )
    _print_layer(console, layer)
    _print_sweep(console, sweep)
    report = {"collective": collective, "ranks": ranks, "modes": layer, "sweep": sweep}
    _write(console, json_path, report)
    if timeline_path:
        title = f"{collective} on {ranks} ranks: compute {compute_ms:g}, link {collective_ms:g} ms"
        _draw(console, timeline_path, played, costs.compute_total, title)


def measure(
    *,
    compute_ms: float,
    collective_ms: float,
    ranks: int,
    collective: Collective,
    sub_slices: int,
    slices: int,
    repeat: int,
    json_path: str | None,
    timeline_path: str | None,
    calibration_path: str | None,
) -> None:
    """Run each mode's loops on real ranks of this machine over an emulated link."""
    from megatron_leangrpo.overlap.measure import Setting, joined, measure_here
    from megatron_leangrpo.overlap.rank_processes import run_on_ranks

    _check_layer(compute_ms, collective_ms, ranks, sub_slices, slices, most_ranks=8)
    _check_between("--repeat", repeat, 1, 100)
    _check_folders(json_path, timeline_path, calibration_path)
    costs = Costs.of_layer(ranks=ranks, compute=compute_ms / 1000, collective=collective_ms / 1000)
    setting = Setting(costs, slices, sub_slices, repeat, collective)
    in_ms = Costs.of_layer(ranks=ranks, compute=compute_ms, collective=collective_ms)
    predicted = simulated_modes(in_ms, collective, sub_slices, slices, 0.0)
    measured = {
        name: [_in_ms(span) for span in spans]
        for name, spans in joined(run_on_ranks(ranks, measure_here, setting)).items()
    }
    rows = [
        {
            **row_of(name, measured, in_ms),
            "predicted_ms": exposed(end_of(predicted[name]), in_ms),
        }
        for name in measured
    ]
    console = Console()
    console.facts(
        f"{_beside(collective)} on {ranks} ranks of this machine, best of {repeat}",
        {
            "compute": f"{compute_ms:g} ms of waiting in place of products",
            "collective": f"{collective_ms:g} ms alone on an emulated link",
        },
    )
    console.table(
        ["mode", "exposed ms", "predicted ms", "end ms", "saved"],
        [
            [
                row["mode"],
                f"{row['exposed_ms']:.1f}",
                f"{row['predicted_ms']:.1f}",
                f"{row['end_ms']:.1f}",
                f"{row['saved']:.1%}",
            ]
            for row in rows
        ],
    )
    _write(console, json_path, {"collective": collective, "ranks": ranks, "modes": rows})
    if timeline_path:
        title = f"measured on {ranks} ranks: compute {compute_ms:g} ms, link {collective_ms:g} ms"
        _draw(console, timeline_path, measured, compute_ms, title)
    if calibration_path:
        _calibrate(console, calibration_path)


def _calibrate(console: Console, path: str) -> None:
    from megatron_leangrpo.overlap.calibrate import calibrate

    calibration = calibrate()
    calibration.save(path)
    link = calibration.link_bytes_per_second
    console.facts(
        f"calibration of {calibration.device}: {path}",
        {
            f"product ({calibration.dtype})": f"{calibration.flops_per_second / 1e12:.3g} TFLOP/s",
            "efficiency in 4 parts": f"{calibration.cut_efficiency['4']:.0%}",
            "sum in the product": f"{calibration.sum_in_product_slowdown:.2f} x its time",
            "link": f"{link / 1e9:.3g} GB/s" if link else "not measured: one device",
        },
    )


def print_choices(console: Console, chosen: "Mapping[Shape, Choice]") -> None:
    """What `overlap.mode=auto` has chosen for each shape of layer, and what it predicts."""
    rows = []
    for shape, choice in chosen.items():
        exposed_us = [choice.exposed_seconds, choice.exposed_without]
        decision = shape.describe(choice.flash)
        rows.append([shape.name, decision, *(f"{seconds * 1e6:.0f}" for seconds in exposed_us)])
    console.table(
        ["tokens a rank x features, or attention", "collectives", "exposed us", "whole us"],
        rows,
        title="overlap.mode=auto: chosen by predicted time, forward and backward",
    )


def _beside(collective: Collective) -> str:
    if collective == "all-to-all":
        return "attention between two all-to-alls (Ulysses)"
    return f"{collective} beside a product"


def _in_ms(span: Span) -> Span:
    return replace(span, start=span.start * 1000, end=span.end * 1000)


def _write(console: Console, path: str | None, report: dict[str, Any]) -> None:
    if path:
        atomic_write(path, json.dumps(report, indent=2) + "\n")
        console.line(f"table as JSON: {path}")


def _draw(
    console: Console,
    path: str,
    modes: Mapping[str, Sequence[Span]],
    compute_ms: float,
    title: str,
) -> None:
    save_timeline(path, modes, compute_ms, title)
    console.line(f"timeline: {path}")


def _print_layer(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    console.table(
        _COLUMNS,
        [
            [row["mode"], f"{row['exposed_ms']:.2f}", f"{row['end_ms']:.1f}", f"{row['saved']:.1%}"]
            for row in rows
        ],
    )


def _print_sweep(console: Console, rows: Sequence[dict[str, float]]) -> None:
    modes = [name for name in rows[0] if name not in ("ranks", "compute_ms", "collective_ms")]
    console.table(
        ["ranks", "compute ms", "collective ms", *modes],
        [[str(row["ranks"]), *(f"{row[name]:.2f}" for name in list(row)[1:])] for row in rows],
        title="exposed ms of the same layer and tokens on more ranks",
    )


def _check_layer(
    compute_ms: float,
    collective_ms: float,
    ranks: int,
    sub_slices: int,
    slices: int,
    most_ranks: int,
) -> None:
    for option, value in {"--compute-ms": compute_ms, "--collective-ms": collective_ms}.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{option} is {value:g}; it must be above 0")
    _check_between("--ranks", ranks, 2, most_ranks)
    _check_between("--sub-slices", sub_slices, 1, 64)
    _check_between("--slices", slices, 1, 64)


def _check_not_negative(option: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ValueError(f"{option} is {value:g}; it must be 0 or more")


def _check_between(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{option} is {value}; it must be from {least} to {most}")


def _check_folders(*paths: str | None) -> None:
    for path in filter(None, paths):
        if not Path(path).parent.is_dir():
            raise ValueError(f"{path}: there is no folder {Path(path).parent}")
