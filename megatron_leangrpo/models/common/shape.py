# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The sizes of a transformer and its inputs, without a tensor: what the planner reckons with."""

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple

BlockKind = Literal["double", "single", "cross"]
"""double: two streams with weights of their own and joint attention; single: attention and MLP side
by side over joined tokens; cross: self-attention, attention to the text, MLP."""


class Parameters(NamedTuple):
    """Parameters of a part, counted over all tensor-parallel ranks."""

    sharded: int
    """Those that tensor parallelism divides."""
    replicated: int
    """Those that every tensor-parallel rank holds."""


NONE = Parameters(0, 0)


@dataclass(frozen=True)
class TransformerShape:
    """One transformer, or the blocks of a pipeline stage, at one input size."""

    blocks: tuple[tuple[BlockKind, int], ...]
    """Kinds of blocks in order, with how many of each follow one another."""
    block_parameters: tuple[Parameters, ...]
    """Of one block of each of these kinds."""
    embedders: Parameters
    """What comes before the blocks; nothing but on the first stage."""
    output: Parameters
    """What comes after the blocks; nothing but on the last stage."""
    hidden: int
    ffn: int
    heads: int
    image_tokens: int
    """Image or video tokens of one sample."""
    text_tokens: int
    text_width: int
    in_channels: int
    out_channels: int
    """Numbers that a token of the model's input and of its output consists of."""
    experts: int = 1
    """Transformers of this shape that the weights consist of; one of them runs at a step."""

    @property
    def is_first(self) -> bool:
        """Whether latents enter here."""
        return self.embedders != NONE

    @property
    def is_last(self) -> bool:
        """Whether the velocity leaves here."""
        return self.output != NONE

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """The kind of every block."""
        return tuple(kind for kind, count in self.blocks for _ in range(count))

    @property
    def sharded_parameters(self) -> int:
        """Parameters of one expert that tensor parallelism divides."""
        return sum(part.sharded for part in self._parts())

    @property
    def replicated_parameters(self) -> int:
        """Parameters of one expert that every tensor-parallel rank holds."""
        return sum(part.replicated for part in self._parts())

    def _parts(self) -> list[Parameters]:
        parts = [self.embedders, self.output]
        for (_, count), one in zip(self.blocks, self.block_parameters):
            parts += [one] * count
        return parts

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.experts * (self.sharded_parameters + self.replicated_parameters)

    def parameters_of_rank(self, tensor_parallel: int) -> int:
        """Parameters on one tensor-parallel rank."""
        sharded = self.sharded_parameters // tensor_parallel
        return self.experts * (sharded + self.replicated_parameters)

    def stage(self, blocks: range) -> "TransformerShape":
        """The part that has some of the blocks."""
        kinds = self.kinds
        own = [(kind, len(list(same))) for kind, same in groupby(kinds[n] for n in blocks)]
        of_kind = {kind: one for (kind, _), one in zip(self.blocks, self.block_parameters)}
        return replace(
            self,
            blocks=tuple(own),
            block_parameters=tuple(of_kind[kind] for kind, _ in own),
            embedders=self.embedders if blocks.start == 0 else NONE,
            output=self.output if blocks.stop == len(kinds) else NONE,
        )


@dataclass(frozen=True)
class Companions:
    """Bytes of the other models that stay on every device during a run."""

    text_encoders: int = 0
    codec: int = 0
    rewards: int = 0
