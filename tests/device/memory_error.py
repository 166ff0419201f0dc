# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Holds the planner's memory model to the peaks that `leangrpo compare --json` measured.

    python -m tests.device.memory_error REPORT.json RECIPE [--section.key=value ...]

The recipe and its overrides are those of the comparison, on one rank.
"""

import json
import sys
from pathlib import Path

from megatron_leangrpo.grpo.architecture import resolve_architecture
from megatron_leangrpo.grpo.commands import load
from megatron_leangrpo.grpo.planning import batches_of, workload_of
from megatron_leangrpo.planner.memory import peak_activations, rank_memory
from megatron_leangrpo.planner.workload import Ranks
from megatron_leangrpo.reporting.console import Console
from megatron_leangrpo.reporting.sentences import byte_size


def main(report: str, recipe: str, *overrides: str) -> None:
    """Print measured and predicted bytes of every schedule of a comparison."""
    config, _ = load(recipe, overrides)
    work = workload_of(config, resolve_architecture(config, needs_weights=False))
    batch, recompute = batches_of(config)(Ranks()), config.model.recompute_granularity
    rows = []
    for name, row in json.loads(Path(report).read_text(encoding="utf-8"))["schedules"].items():
        # A comparison measures the second run, in which jagg approximates.
        activations = peak_activations(work, batch, name, recompute, Ranks(), approximated=True)
        memory = rank_memory(work, batch, name, recompute, Ranks())
        rows += [
            _row(f"{name}, activations", row["peak_activation_bytes"], activations),
            _row(f"{name}, gradient buffers", row["gradient_buffer_bytes"], memory.gradients),
            _row(f"{name}, moment buffers", row["moment_buffer_bytes"], memory.moments),
        ]
    columns = ["memory model", "measured", "predicted", "error"]
    Console().table(columns, [row for row in rows if row is not None])


def _row(name: str, measured: int, predicted: int) -> list[str] | None:
    """A row of the table; none where there is nothing on either side."""
    if not measured and not predicted:
        return None
    # Adding zero takes the sign from a zero.
    error = f"{round(predicted / measured - 1, 3) + 0.0:+.1%}" if measured else "-"
    return [name, byte_size(measured), byte_size(predicted), error]


if __name__ == "__main__":
    main(*sys.argv[1:])
