# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The sizes of a transformer and its inputs, without a tensor: what the planner reckons with."""

from dataclasses import dataclass
from typing import Literal

BlockKind = Literal["double", "single", "cross"]
"""double: two streams with weights of their own and joint attention; single: attention and MLP side
by side over joined tokens; cross: self-attention, attention to the text, MLP."""


@dataclass(frozen=True)
class TransformerShape:
    """One transformer at one input size; parameters are counted over all tensor-parallel ranks."""

    blocks: tuple[tuple[BlockKind, int], ...]
    """Kinds of blocks in order, with how many of each follow one another."""
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
    sharded_parameters: int
    """Parameters that tensor parallelism divides."""
    replicated_parameters: int
    """Parameters that every tensor-parallel rank holds."""
    experts: int = 1
    """Transformers of this shape that the weights consist of; one of them runs at a step."""

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.experts * (self.sharded_parameters + self.replicated_parameters)

    def parameters_of_rank(self, tensor_parallel: int) -> int:
        """Parameters on one tensor-parallel rank."""
        sharded = self.sharded_parameters // tensor_parallel
        return self.experts * (sharded + self.replicated_parameters)


@dataclass(frozen=True)
class Companions:
    """Bytes of the other models that stay on every device during a run."""

    text_encoders: int = 0
    codec: int = 0
    rewards: int = 0
