# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The modes that `leangrpo overlap` compares, and the rows of its tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_leangrpo.overlap.cost_model import (
    Collective,
    Costs,
    Flash,
    attention_time,
    exposed,
    flash_time,
    none_time,
    slicing_time,
)
from megatron_leangrpo.overlap.simulated_attention import simulate_attention
from megatron_leangrpo.overlap.simulator import (
    Span,
    end_of,
    simulate_flash,
    simulate_none,
    simulate_slicing,
)


def flash_modes(collective: Collective, sub_slices: int) -> dict[str, Flash]:
    """Whole slices and cut ones, whose running sum is the product's own addend; groups of heads."""
    if collective == "all-to-all":
        return {f"flash ({sub_slices} groups)": Flash(sub_slices=sub_slices)}
    modes = {"flash (ring, 1)": Flash()}
    if sub_slices > 1:
        in_product = collective == "reduce-scatter"
        modes[f"flash (ring, {sub_slices})"] = Flash(sub_slices=sub_slices, in_product=in_product)
    return modes


def simulated_modes(
    costs: Costs, collective: Collective, sub_slices: int, slices: int, slice_cost: float
) -> dict[str, list[Span]]:
    """Every mode's tasks, under the name it is printed under, without overlap first."""
    flash = flash_modes(collective, sub_slices)
    if collective == "all-to-all":
        cut = {name: simulate_attention(costs, f.sub_slices) for name, f in flash.items()}
        return {"none": simulate_attention(costs, 1), **cut}
    return {
        "none": simulate_none(costs, collective),
        f"slicing ({slices})": simulate_slicing(costs, collective, slices, slice_cost),
        **{name: simulate_flash(costs, collective, f) for name, f in flash.items()},
    }


def row_of(name: str, modes: Mapping[str, Sequence[Span]], costs: Costs) -> dict[str, Any]:
    """What one of the played modes exposes, and what it saves of the time without overlap."""
    end = end_of(modes[name])
    return {
        "mode": name,
        "exposed_ms": exposed(end, costs),
        "end_ms": end,
        "saved": 1 - end / end_of(modes["none"]),
    }


def sweep_row(
    costs: Costs,
    size: int,
    collective: Collective,
    sub_slices: int,
    slices: int,
    slice_cost: float,
) -> dict[str, float]:
    """The same layer and tokens on `size` ranks: products, slices and additions get smaller."""
    share = costs.ranks / size
    exchange = collective == "all-to-all"
    scaled = Costs(
        ranks=size,
        compute=costs.compute * share**2,
        # What goes to one rank is a share of the tokens, and in an all-to-all of the heads as well.
        hop=costs.hop * (share**2 if exchange else share),
        latency=costs.latency,
        add=costs.add * share,
    )
    if exchange:
        times = {"none": attention_time(scaled, 1)}
    else:
        times = {
            "none": none_time(scaled),
            f"slicing ({slices})": slicing_time(scaled, slices, slice_cost),
        }
    for name, flash in flash_modes(collective, sub_slices).items():
        times[name] = flash_time(scaled, collective, flash)
    return {
        "compute_ms": scaled.compute_total,
        "collective_ms": times["none"] - scaled.compute_total,
        **{name: exposed(time, scaled) for name, time in times.items()},
    }
