# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The arguments of `leangrpo overlap`; imports nothing that is slow."""

import argparse
from collections.abc import Callable
from typing import Any


def add_overlap_command(commands: Any) -> None:
    """Add the command and its own commands to the parsers of `leangrpo`."""
    overlap = commands.add_parser(
        "overlap",
        help="what overlapping products with collectives gains, simulated or measured",
        allow_abbrev=False,
    )
    kinds = overlap.add_subparsers(dest="overlap_command", required=True, metavar="COMMAND")
    _add_simulate(kinds)
    _add_measure(kinds)


def _add_simulate(kinds: Any) -> None:
    simulate = kinds.add_parser(
        "simulate",
        help="exposed time of every mode for one layer, and on 2 to 64 ranks",
        description="Play one layer and its collective in every mode, without a device.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = simulate.add_argument
    add("--compute-ms", type=float, default=77.0, metavar="MS", help="the layer's product")
    add("--collective-ms", type=float, default=43.8, metavar="MS", help="the collective alone")
    add("--ranks", type=int, default=4, metavar="N", help="ranks of the group")
    add(
        "--collective",
        choices=["reduce-scatter", "all-gather", "all-to-all"],
        default="reduce-scatter",
        help="what the layer needs; all-to-all: an attention between two of them (Ulysses)",
    )
    _add_sub_slices(add)
    add("--slices", type=int, default=8, metavar="K", help="collectives of plain slicing")
    add(
        "--add-ms",
        type=float,
        default=0.1,
        metavar="MS",
        help="calibration input: adding one slice to the running sum",
    )
    add(
        "--slice-cost-ms",
        type=float,
        default=1.6,
        metavar="MS",
        help="calibration input: what each collective of slicing costs besides its bytes",
    )
    add(
        "--latency-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="calibration input: what a message costs besides its bytes",
    )
    _add_outputs(simulate)
    simulate.set_defaults(run=_simulate)


def _add_measure(kinds: Any) -> None:
    measure = kinds.add_parser(
        "measure",
        help="the same on real ranks of this machine, over an emulated link",
        description="Run the real schedules on real ranks; products and link only take time.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = measure.add_argument
    add("--compute-ms", type=float, default=200.0, metavar="MS", help="the layer's product")
    add("--collective-ms", type=float, default=90.0, metavar="MS", help="the collective alone")
    add("--ranks", type=int, default=4, metavar="N", help="ranks, up to 8")
    add(
        "--collective",
        choices=["reduce-scatter", "all-to-all"],
        default="reduce-scatter",
        help="what the layer needs; all-to-all: an attention between two of them (Ulysses)",
    )
    _add_sub_slices(add)
    add("--slices", type=int, default=4, metavar="K", help="collectives of plain slicing")
    add("--repeat", type=int, default=3, metavar="TIMES", help="runs, of which the best counts")
    _add_outputs(measure)
    add(
        "--calibrate",
        metavar="FILE",
        help="also measure this machine's products and link for the cost model (JSON)",
    )
    measure.set_defaults(run=_measure)


def _add_sub_slices(add: Callable[..., object]) -> None:
    text = "cuts of a slice in the last row; all-to-all: groups of heads"
    add("--sub-slices", type=int, default=4, metavar="M", help=text)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write the tables as JSON")
    parser.add_argument(
        "--timeline", metavar="FILE", help="also draw who computes and who sends when (PNG)"
    )


def _simulate(arguments: argparse.Namespace) -> None:
    from megatron_leangrpo.overlap import commands

    commands.simulate(
        compute_ms=arguments.compute_ms,
        collective_ms=arguments.collective_ms,
        ranks=arguments.ranks,
        collective=arguments.collective,
        sub_slices=arguments.sub_slices,
        add_ms=arguments.add_ms,
        slices=arguments.slices,
        slice_cost_ms=arguments.slice_cost_ms,
        latency_ms=arguments.latency_ms,
        json_path=arguments.json,
        timeline_path=arguments.timeline,
    )


def _measure(arguments: argparse.Namespace) -> None:
    from megatron_leangrpo.overlap import commands

    commands.measure(
        compute_ms=arguments.compute_ms,
        collective_ms=arguments.collective_ms,
        ranks=arguments.ranks,
        collective=arguments.collective,
        sub_slices=arguments.sub_slices,
        slices=arguments.slices,
        repeat=arguments.repeat,
        json_path=arguments.json,
        timeline_path=arguments.timeline,
        calibration_path=arguments.calibrate,
    )
