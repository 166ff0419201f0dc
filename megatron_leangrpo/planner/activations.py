# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What the graph of one forward of a transformer holds, and how high its backward goes."""

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_leangrpo.models.common.shape import TransformerShape
from megatron_leangrpo.planner.blocks import Layout
from megatron_leangrpo.planner.kinds import (
    block_tape,
    embedding_work,
    input_bytes,
    output_tape,
)
from megatron_leangrpo.planner.tape import Tape


@dataclass(frozen=True)
class ForwardCost:
    """One forward of the whole transformer on one rank."""

    flops: float
    """Of matrix products; a backward has twice as many."""
    written: int
    """Bytes of the tensors it writes."""
    sent: float
    """Bytes sent in collectives over the ranks that share a trajectory."""
    exchanged: float
    """Those of them that go to the ranks of the context."""
    collectives: int


@dataclass(frozen=True)
class GraphMemory:
    """Bytes on one rank for the graph of one forward."""

    held: int
    """Kept from the forward to the backward."""
    peak: int
    """Highest point of the backward, what is held included."""
    joint_peak: int
    """Highest point of one backward of two graphs (of guidance), both held included."""
    without: int
    """Highest point of a forward without a graph."""


@lru_cache(maxsize=512)
def graph_memory(shape: TransformerShape, layout: Layout, recompute: str) -> GraphMemory:
    """Bytes of one graph; `recompute` is none, selective (attention) or full (every block)."""
    full = recompute == "full"
    tapes = _tapes(shape, layout)
    # Blocks of a kind share one tape.
    distinct = {id(tape): tape for tape, _ in tapes}
    peaks = {key: tape.backward_peak() for key, tape in distinct.items()}
    held = [input_bytes(shape, layout)]
    held += [tape.held(recomputed=full and not last) for tape, last in tapes]
    peak = joint = below = held[0]
    # A weight that two graphs share gets its gradient when both have come: those of the first one
    # wait, block after block, and are all there when the second one starts.
    above = sum(tape.weights for tape, _ in tapes)
    upto = shape.replicated_parameters * layout.width
    for (tape, _), size in zip(tapes, held[1:]):
        # A recomputed block has all its tensors again while its own backward runs.
        highest = below + peaks[id(tape)]
        above -= tape.weights
        upto += tape.weights
        joint = max(joint, sum(held) + highest + above, highest + upto)
        peak = max(peak, highest)
        below += size
    without = max(tape.forward_peak() for tape in distinct.values())
    return GraphMemory(sum(held), peak, joint, without)


@lru_cache(maxsize=512)
def forward_cost(shape: TransformerShape, layout: Layout) -> ForwardCost:
    """Work of one forward."""
    tapes = [tape for tape, _ in _tapes(shape, layout)]
    flops, written = embedding_work(shape, layout)
    return ForwardCost(
        flops=flops + sum(tape.flops for tape in tapes),
        written=written + sum(tape.written for tape in tapes),
        sent=sum(tape.sent for tape in tapes),
        exchanged=sum(tape.exchanged for tape in tapes),
        collectives=sum(tape.collectives for tape in tapes),
    )


def _tapes(shape: TransformerShape, layout: Layout) -> list[tuple[Tape, bool]]:
    """The tapes of all blocks in order, and of the output if it is here, which alone is True."""
    ends = layout.packing.ends if layout.packing else 0
    plain = replace(layout, packing=None)
    kinds, tapes = shape.kinds, {}
    found: list[tuple[Tape, bool]] = []
    for number, kind in enumerate(kinds):
        at_end = shape.is_first and number < ends
        at_end |= shape.is_last and number >= len(kinds) - ends
        if (kind, at_end) not in tapes:
            tapes[kind, at_end] = block_tape(kind, shape, plain if at_end else layout)
        found.append((tapes[kind, at_end], False))
    return [*found, (output_tape(shape, plain), True)] if shape.is_last else found
