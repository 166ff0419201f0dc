# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""How long a linear layer and its collective take in each mode: closed forms.

All times are in one unit, whichever the caller likes. `simulator` plays the same schedules task by
task; the two agree within 2 %. What is not counted: products that run slower because they are cut
or because the link takes a part of the device. Those are measured, see `measure`.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_leangrpo.overlap.schedule import Pattern

Collective = Literal["all-gather", "reduce-scatter", "all-to-all"]
"""all-to-all: the two around an attention, tokens to heads and back."""

QKV_SHARE = 0.75
"""Of what travels around an attention: three tensors to the heads, one back to the tokens."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one layer costs on each rank."""

    ranks: int
    compute: float
    """The product of one slice."""
    hop: float
    """One slice on the link: its bytes over the bandwidth of one direction."""
    latency: float = 0.0
    """What every message costs besides its bytes."""
    add: float = 0.0
    """Adding one slice to a running sum, where the product does not do it."""

    @classmethod
    def of_layer(
        cls,
        *,
        ranks: int,
        compute: float,
        collective: float,
        latency: float = 0.0,
        add: float = 0.0,
    ) -> "Costs":
        """From the whole layer's product and the whole collective of a ring, alone on the link."""
        hop = collective / (ranks - 1) if ranks > 1 else 0.0
        return cls(ranks=ranks, compute=compute / ranks, hop=hop, latency=latency, add=add)

    @property
    def compute_total(self) -> float:
        """The products alone: no mode is faster."""
        return self.ranks * self.compute

    @property
    def collective_total(self) -> float:
        """The collective alone."""
        return (self.ranks - 1) * (self.hop + self.latency)


@dataclass(frozen=True, kw_only=True)
class Flash:
    """How a collective is cut: its pattern and the number of sub-slices of a slice."""

    pattern: Pattern = "ring"
    sub_slices: int = 1
    in_product: bool = False
    """The running sum of a ring is the matrix product's own addend: nothing is left to add."""


def none_time(costs: Costs) -> float:
    """The product, then the collective (or the other way round)."""
    return costs.compute_total + costs.collective_total


def slicing_time(costs: Costs, chunks: int, chunk_cost: float = 0.0) -> float:
    """`chunks` collectives, each beside the product of another chunk: one is always exposed.

    `chunk_cost` is what each of them costs besides its bytes.
    """
    if costs.ranks == 1:
        return costs.compute_total
    compute = costs.compute_total / chunks
    collective = costs.collective_total / chunks + chunk_cost
    return max(chunks * compute + collective, compute + chunks * collective)


def flash_time(costs: Costs, collective: Collective, flash: Flash) -> float:
    """The longest of the chains that can decide when the last rank ends."""
    if costs.ranks == 1:
        return costs.compute_total
    if collective == "all-to-all":
        return attention_time(costs, flash.sub_slices)
    if collective == "all-gather":
        return _all_gather(costs, flash.sub_slices)
    if flash.pattern == "direct":
        return _direct_reduce_scatter(costs, flash.sub_slices)
    if flash.in_product:
        return _ring_sum_in_product(costs, flash.sub_slices)
    return _ring_reduce_scatter(costs, flash.sub_slices)


def messages(collective: Collective, ranks: int) -> int:
    """Messages of a rank in a collective that is not cut; those of an attention are two."""
    return (2 if collective == "all-to-all" else 1) * (ranks - 1)


def attention_time(costs: Costs, groups: int) -> float:
    """An attention between two all-to-alls, cut into groups of heads; one group overlaps nothing.

    `costs.compute` is a rank's attention over the ranks, `costs.hop` what travels to and from one
    other rank. The link carries all groups to the heads before it carries any back.
    """
    peers, attend = costs.ranks - 1, costs.compute_total / groups
    there = peers * (QKV_SHARE * costs.hop / groups + costs.latency)
    back = peers * ((1 - QKV_SHARE) * costs.hop / groups + costs.latency)
    return max(
        there + groups * attend + back,
        there + attend + groups * back,
        groups * there + attend + back,
        groups * (there + back),
    )


def exposed(time: float, costs: Costs) -> float:
    """The part of a mode's time in which nothing is computed."""
    return time - costs.compute_total


def _all_gather(costs: Costs, m: int) -> float:
    n, slice_, hop = costs.ranks, costs.compute, costs.hop / m + costs.latency
    return max(
        max(slice_, hop) + (n - 1) * slice_,
        (n - 2) * m * hop + hop + slice_,
        (n - 1) * m * hop + slice_ / m,
    )


def _ring_reduce_scatter(costs: Costs, m: int) -> float:
    n, slice_, hop, add = costs.ranks, costs.compute, costs.hop / m + costs.latency, costs.add / m
    return max(
        n * slice_ + add,
        slice_ / m + (n - 1) * m * hop + add,
        slice_ + (n - 1) * (hop + add),
    )


def _ring_sum_in_product(costs: Costs, m: int) -> float:
    n, part, hop = costs.ranks, costs.compute / m, costs.hop / m + costs.latency
    return max(
        n * costs.compute,
        m * part + (n - 1) * (part + hop),
        part + (n - 1) * m * hop + part,
    )


def _direct_reduce_scatter(costs: Costs, m: int) -> float:
    n, slice_, hop, add = costs.ranks, costs.compute, costs.hop / m + costs.latency, costs.add / m
    # The first partial sum to arrive is only kept; the rank's own product is added last.
    adds = add if n == 2 else 2 * add
    return max(
        n * slice_ + add,
        slice_ / m + (n - 1) * m * hop + adds,
        (n - 1) * slice_ + hop + adds,
    )


def bulk_backward_time(
    *, all_gather: float, dgrad: float, reduce_scatter: float, wgrad: float
) -> float:
    """A column-parallel backward: gather beside the input gradient, then reduction beside wgrad."""
    return max(all_gather, dgrad) + max(reduce_scatter, wgrad)


def hiding_features(flops_per_second: float, bytes_per_second: float, element_bytes: int) -> float:
    """The features a slice's product must sum over to be as long as its hop.

    Local input features for a reduce-scatter, local output features for an all-gather; the number
    of tokens and the other dimension cancel.
    """
    return element_bytes * flops_per_second / (2 * bytes_per_second)
