# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The autograd nodes that transformer blocks consist of, for one rank and one forward.

Each method stands for a node or two of `models/common`: what it keeps is what autograd keeps there
(`tests/planner` compares with the allocator).
"""

from dataclasses import dataclass
from typing import Any

from megatron_leangrpo.models.common.shape import TransformerShape
from megatron_leangrpo.planner.adapters import Adapters
from megatron_leangrpo.planner.packing import Packing
from megatron_leangrpo.planner.tape import Tape


@dataclass(frozen=True)
class Layout:
    """How one forward runs on a rank."""

    batch: int
    width: int
    """Bytes of an activation or weight."""
    tensor_parallel: int = 1
    context_parallel: int = 1
    sequence_parallel: bool = True
    selective: bool = False
    """Attention is recomputed in the backward."""
    packing: Packing | None = None
    """Of linears whose weights are trained in FP8."""
    adapters: Adapters | None = None
    """All that is trained; None trains the weights."""

    @property
    def wide(self) -> int:
        """Bytes of the numbers that norms compute with: float32 or wider."""
        return max(4, self.width)

    @property
    def gathered(self) -> int:
        """Ranks whose tokens a projection gathers."""
        return self.tensor_parallel if self.sequence_parallel else 1

    def shard(self, *streams: int) -> int:
        """Tokens of a rank between the projections, pads of each stream included."""
        shards = self.gathered * self.context_parallel
        return sum(-(-tokens // shards) for tokens in streams)


class BlockWriter:
    """Writes a tape in terms of the layers of `models/common`.

    Streams are given by their token counts, since each is padded by itself.
    """

    def __init__(self, shape: TransformerShape, layout: Layout) -> None:
        self.shape, self.layout = shape, layout
        self.tape, self.hidden = Tape(), shape.hidden
        self.own_heads = shape.heads // layout.tensor_parallel
        self.own_hidden = shape.hidden // layout.tensor_parallel
        self.own_ffn = shape.ffn // layout.tensor_parallel
        # Inside attention, where the ranks of the context have heads instead of tokens.
        self.heads_inside = -(-self.own_heads // layout.context_parallel)
        self.inside = self.heads_inside * (shape.hidden // shape.heads)
        self.vector = self.rows(1, shape.hidden)
        self._packed: set[str] = set()
        self._own_part: dict[str, str] = {}
        """What a rank has given to a gathered tensor, which is what adapters multiply."""

    def rows(self, tokens: int, features: int) -> int:
        """Bytes of `[tokens, b, features]`."""
        return tokens * self.layout.batch * features * self.layout.width

    def stream(self, *streams: int) -> int:
        """Bytes of residual streams between the projections."""
        return self.rows(self.layout.shard(*streams), self.hidden)

    def padded(self, *streams: int) -> int:
        """Tokens of gathered streams, pads included."""
        return self.layout.shard(*streams) * self.layout.gathered

    def all_tokens(self, *streams: int) -> int:
        """Tokens of whole streams, pads included."""
        return self.padded(*streams) * self.layout.context_parallel

    def whole(self, *streams: int) -> int:
        """Bytes of gathered streams."""
        return self.rows(self.padded(*streams), self.hidden)

    def modulation(self, vec: str, chunks: int) -> list[str]:
        """`chunks` vectors of the conditioning vector."""
        own, size = chunks * self.own_hidden, chunks * self.vector
        out = self.tape.add(
            "modulation",
            size,
            [vec],
            saved=[vec],
            weight=0 if self.layout.adapters else own * self.hidden * self.layout.width,
            flops=2.0 * self.layout.batch * own * self.hidden,
            sent=self.sent(size),
        )
        return self.tape.split(out, {f"chunk {n}": self.vector for n in range(chunks)})

    def modulated_norm(self, x: str, shift: str, scale: str, *streams: int) -> str:
        """Layer norm without weights, then `shift + norm * (1 + scale)`."""
        tape, size = self.tape, self.stream(*streams)
        statistics = 2 * self.layout.shard(*streams) * self.layout.batch * self.layout.wide
        norm = tape.add("norm", size, [x], saved=[x], extra=statistics)
        factor = tape.add("1 + scale", self.vector, [scale])
        # Whole grad * norm, and the product it is made of, before the sum over tokens.
        # The norm is for the factor's gradient.
        saved = [factor] if self.layout.adapters else [norm, factor]
        return tape.add("modulated", size, [shift, norm, factor], saved=saved, scratch=2 * size)

    def scaled_norm(self, x: str, shift: str, factor: str, *streams: int) -> str:
        """The same in one node, which keeps its input alone."""
        layout, numbers = self.layout, self.layout.shard(*streams) * self.layout.batch
        # Wide: the gradient, the normalised input and its product with it, and grad * factor.
        scratch = 4 * numbers * self.hidden * layout.wide
        return self.tape.add(
            "normed",
            self.stream(*streams),
            [x, shift, factor],
            saved=[x, factor],
            extra=2 * numbers * layout.wide,
            scratch=scratch,
        )

    def gated_residual(self, x: str, gate: str, update: str, *streams: int) -> str:
        """`x + gate * update`; the gradient of x is the output's."""
        size = self.stream(*streams)
        saved = [gate] if self.layout.adapters else [gate, update]
        inputs = [x, gate, update]
        return self.tape.add("residual", size, inputs, saved=saved, aliases=[x], scratch=size)

    def gather(self, x: str, *streams: int) -> str:
        """All tokens of streams, for several column-parallel products."""
        layout = self.layout
        if layout.tensor_parallel == 1 or layout.packing is not None:
            return x  # Packed rows are gathered in the linears' own node.
        size = self.whole(*streams)
        if layout.sequence_parallel:
            out = self.tape.add("gathered", size, [x], sent=self.sent(size))
            self._own_part[out] = x
            return out
        # Nothing to do forwards; the gradient is summed over the ranks in a new tensor.
        return self.tape.split(x, {"entered": size})[0]

    def column(
        self, linear: str, x: str, features: int, *streams: int, gathered: bool = False
    ) -> str:
        """A column-parallel linear to this rank's `features`; a `gathered` x is whole already."""
        communicates = self.layout.tensor_parallel > 1
        communicates &= not gathered or self.layout.packing is not None
        whole = self.whole(*streams)
        return self.tape.add(
            "column",
            self.rows(self.padded(*streams), features),
            [x],
            **self.kept(
                linear, x, (self.hidden, features), self.layout.shard(*streams), together=gathered
            ),
            # The gradient of all tokens, before it is summed and scattered.
            scratch=whole if communicates else 0,
            flops=self._flops(features * self.hidden, *streams),
            sent=self.sent(whole) if communicates else 0.0,
        )

    def row(self, linear: str, inputs: dict[str, int], *streams: int) -> str:
        """A row-parallel linear over inputs side by side, given with their features here."""
        whole, out = self.whole(*streams), ""
        for x, features in inputs.items():
            out = self.tape.add(
                "row",
                whole,
                [out, x] if out else [x],
                **self.kept(linear, x, (features, self.hidden), self.padded(*streams)),
                # A second product is added to the first: their gradients are the sum's.
                aliases=[out] if out else [],
                flops=self._flops(self.hidden * features, *streams),
            )
        if self.layout.tensor_parallel == 1:
            return out
        shard = self.stream(*streams)
        reduced = self.tape.add("reduced", shard, [out], sent=self.sent(whole))
        return self.tape.add("biased", shard, [reduced], aliases=[reduced])

    def kept(
        self, linear: str, x: str, sizes: tuple[int, int], tokens: int, together: bool = False
    ) -> dict[str, Any]:
        """What a linear keeps of `tokens` of its input x, and its weight gradient.

        `sizes` are features in and out. Linears that project `together` over ranks keep one packed
        input.
        """
        layout, alone = self.layout, self.layout.tensor_parallel == 1
        if layout.adapters is not None:
            ranks = layout.adapters.ranks(linear)
            factors = layout.adapters.factors(linear, sizes, layout.width)
            kept = {"extra": self.rows(tokens, ranks) + factors, "weight": factors}
            return {"saved": [self._own_part.get(x, x)] if ranks else [], **kept}
        weight = sizes[0] * sizes[1] * layout.width
        if layout.packing is None:
            return {"saved": [x], "weight": weight}
        if together and not alone and x in self._packed:
            return {"weight": weight}
        self._packed.add(x)
        row = layout.packing.row(sizes[0], alone)
        return {"extra": tokens * layout.batch * row, "weight": weight}

    def projected(self, *streams: int) -> int:
        """Tokens that go on from a projection: a rank alone in its context has all, and no pads."""
        return sum(streams) if self.layout.context_parallel == 1 else self.padded(*streams)

    def with_pads(self, x: str, tokens: int) -> str:
        """A stream of attended tokens, padded as it was projected."""
        if self.padded(tokens) == self.projected(tokens):
            return x
        size = self.rows(self.padded(tokens), self.own_hidden)
        return self.tape.add("padded", size, [x], aliases=[x])

    def queries_keys(self, qkv: str, tokens: int) -> tuple[str, str]:
        """Normalised and rotated queries and keys, packed, and the values of a projection."""
        values = self.rows(tokens, self.own_hidden)
        qk, v = self.tape.split(qkv, {"qk": 2 * values, "v": values})
        return self.normalised(qk, 2 * values, tokens * 2 * self.own_heads), v

    def normalised(self, x: str, size: int, vectors: int) -> str:
        """RMS norm over the heads of packed `vectors`, and rotation."""
        layout = self.layout
        # Rotated gradient, normalised input, two products and the result, in float32 or wider.
        scratch = 5 * (size // layout.width * layout.wide) - size
        inverse = vectors * layout.batch * layout.wide
        return self.tape.add("rotated", size, [x], saved=[x], extra=inverse, scratch=scratch)

    def attention(self, q: str, k: str, v: str, queries: int, keys: int, width: int) -> str:
        """Attention to `[s, b, width]`."""
        layout, size = self.layout, self.rows(queries, width)
        heads = width // (self.hidden // self.shape.heads)
        statistics = queries * layout.batch * heads * layout.wide
        return self.tape.add(
            "attended",
            size,
            [q, k, v],
            saved=[q, k, v],
            keeps_output=not layout.selective,
            extra=0 if layout.selective else statistics,
            scratch=size + statistics if layout.selective else 0,
            flops=4.0 * queries * keys * layout.batch * width,
        )

    def self_attention(self, qk: str, v: str, *streams: int) -> str:
        """Attention of all tokens to themselves, from and to this rank's projected tokens."""
        total, inside = sum(streams), self.inside
        size = self.rows(total, inside)
        if self.layout.context_parallel == 1:
            q, k = self.tape.split(qk, {"q": size, "k": size})
            return self.attention(q, k, v, total, total, inside)
        tape, own = self.tape, self.heads_inside * self.layout.context_parallel
        sent = self.rows(self.padded(*streams), own * (self.hidden // self.shape.heads))
        packed = tape.add("packed", 3 * sent, [qk, v], aliases=[qk, v])
        whole = self.rows(self.all_tokens(*streams), inside)
        arrived = self._exchange(packed, 3 * whole)
        q, k, v = tape.split(arrived, {"q": whole, "k": whole, "v": whole})
        if whole != size:
            q, k, v = (tape.add("without pads", size, [x]) for x in (q, k, v))
        out = self.attention(q, k, v, total, total, inside)
        if whole != size:
            out = tape.add("with pads", whole, [out])
        return tape.add("joined", sent, [self._exchange(out, sent)])

    def _exchange(self, x: str, size: int) -> str:
        ranks = self.layout.context_parallel
        sent = size * (ranks - 1) / ranks
        self.tape.exchanged += sent
        return self.tape.add("exchanged", size, [x], sent=sent)

    def gelu(self, x: str, *streams: int) -> str:
        """GELU of the widened features."""
        return self.tape.add("gelu", self.rows(self.padded(*streams), self.own_ffn), [x], saved=[x])

    def mlp(self, kind: str, x: str, *streams: int) -> str:
        """Two linears with GELU between."""
        wide = self.gelu(self.column(f"{kind}.fc1", x, self.own_ffn, *streams), *streams)
        return self.row(f"{kind}.fc2", {wide: self.own_ffn}, *streams)

    def _flops(self, matrix: int, *streams: int) -> float:
        return 2.0 * self.padded(*streams) * self.layout.batch * matrix

    def sent(self, whole: int) -> float:
        """Bytes a rank sends to gather or to reduce-scatter a tensor; both for an all-reduce."""
        size = self.layout.tensor_parallel
        return (1 if self.layout.sequence_parallel else 2) * whole * (size - 1) / size
