# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What `verify` and `inspect` print."""

from __future__ import annotations

from typing import Any

from checkpoints_tools.forward import ForwardDifference
from checkpoints_tools.naming import listed
from checkpoints_tools.verifying import Comparison
from megatron_leangrpo.reporting.console import Console
from megatron_leangrpo.reporting.sentences import byte_size

_SHOWN = 8


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print the verdict and the first few differences."""
    for what, names in (
        ("only in A", comparison.only_first),
        ("only in B", comparison.only_second),
        ("other shapes", comparison.shapes),
        ("other dtypes", comparison.dtypes),
    ):
        if names:
            console.line(f"{what}: {len(names)} ({listed(names)})")
    if comparison.values:
        worst = sorted(comparison.values.items(), key=lambda item: -item[1][1])
        console.table(
            ["tensor", "max difference", "relative L2"],
            [[name, f"{a:.3g}", f"{r:.3g}"] for name, (a, r) in worst[:_SHOWN]],
            title=f"{len(worst)} of {comparison.compared} tensors differ"
            + (f", the worst {_SHOWN}:" if len(worst) > _SHOWN else ":"),
        )
    console.line(f"EQUAL: {comparison.compared} tensors" if comparison.equal else "DIFFERENT")


def print_forward(console: Console, difference: ForwardDifference, of: str = "") -> bool:
    """Print how far two outputs are apart; returns whether that is rounding."""
    verdict = "EQUAL" if difference.equal else "DIFFERENT"
    what = f"forward of {of}" if of else "forward"
    console.line(
        f"{what} {verdict}: max difference {difference.largest:.3g}, relative L2 "
        f"{difference.relative:.3g} (allowed {difference.tolerance:.0e})"
    )
    return difference.equal


def print_description(console: Console, described: dict[str, Any]) -> None:
    """Print what is in a checkpoint as a list of facts and a table of tensors."""
    count = len(described["transformers"])
    number = f"{count} transformers of " if count > 1 else ""
    facts = {
        "format": described["format"],
        "model": f"{described['model']}, {number}{described['architecture']}",
        "parameters": f"{described['parameters']:,}".replace(",", " "),
        "size": byte_size(described["bytes"]),
        "dtypes": ", ".join(f"{n} x {dtype}" for dtype, n in described["dtypes"].items()),
    }
    if described["format"] == "megatron":
        step = described["step"]
        facts["step"] = "imported" if step is None else str(step)
        facts["cut for"] = f"tensor parallel {described['tensor_model_parallel_size']}"
        facts["average"] = "yes" if described["has_average"] else "no"
    console.facts(described["path"], facts)
    for note in described["notes"]:
        console.warning(note)
    _print_tensors(console, described)


def print_adapters(console: Console, described: dict[str, Any]) -> None:
    """Print what adapters there are, and their tensors."""
    facts = {
        "format": described["format"],
        "adapters": f"{described['projections']} projections, rank "
        f"{_numbers(described['ranks'])}, alpha {_numbers(described['alphas'])}",
        "parameters": f"{described['parameters']:,}".replace(",", " "),
        "size": byte_size(described["bytes"]),
        "dtypes": ", ".join(f"{n} x {dtype}" for dtype, n in described["dtypes"].items()),
    }
    if "base" in described:
        facts |= {"base": described["base"], "step": str(described["step"])}
    console.facts(described["path"], facts)
    _print_tensors(console, described)


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _print_tensors(console: Console, described: dict[str, Any]) -> None:
    console.table(
        ["tensor", "shape", "dtype"],
        [
            [name, " x ".join(map(str, tensor["shape"])), tensor["dtype"]]
            for name, tensor in described["tensors"].items()
        ],
    )
