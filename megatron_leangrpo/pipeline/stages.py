# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which stage of a pipeline has which blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

SPLIT_SETTING = "parallel.pipeline_split"
SIZE_SETTING = "parallel.pipeline_model_parallel_size"


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline and its blocks.

    What embeds the inputs comes before the first stage's blocks, what makes the velocity after the
    last stage's.
    """

    index: int
    stages: int
    blocks: range
    """Blocks are counted from the first one of the transformer."""

    @classmethod
    def whole(cls, blocks: int) -> "Stage":
        """All of a transformer."""
        return cls(0, 1, range(blocks))

    @classmethod
    def of(cls, split: Sequence[int], index: int) -> "Stage":
        """The stage `index` of a split."""
        begin = sum(split[:index])
        return cls(index, len(split), range(begin, begin + split[index]))

    @property
    def is_first(self) -> bool:
        """Whether latents enter here."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the velocity leaves here."""
        return self.index == self.stages - 1


def check_stages(stages: int, blocks: int) -> None:
    """Raise ValueError where a stage would be left without a block."""
    if not 1 <= stages <= blocks:
        valid = "1" if blocks == 1 else f"1 to {blocks}"
        raise ValueError(
            f"{SIZE_SETTING} is {stages}, but the transformer has {blocks} "
            f"block{'s' if blocks > 1 else ''} and every stage needs one; valid values: {valid}"
        )


def check_split(split: Sequence[int], stages: int, blocks: int) -> tuple[int, ...]:
    """An explicit split, numbers of blocks a stage, once it is known to add up."""
    check_stages(stages, blocks)
    problem = None
    if len(split) != stages:
        problem = f"has {len(split)} numbers for {stages} stages ({SIZE_SETTING})"
    elif any(count < 1 for count in split):
        problem = "leaves a stage without a block"
    elif sum(split) != blocks:
        problem = f"adds up to {sum(split)}, but the transformer has {blocks} blocks"
    if problem is not None:
        even = list(balanced_split([1.0] * blocks, stages))
        raise ValueError(
            f"{SPLIT_SETTING} is {list(split)}, which {problem}; valid: {stages} positive numbers "
            f"that add up to {blocks}, as {even}"
        )
    return tuple(split)


def balanced_split(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Numbers of blocks a stage, so that the costliest stage costs as little as can be.

    `costs[i]` is what block `i` costs: seconds or bytes. Of equally good splits, an even one.
    """
    blocks = len(costs)
    check_stages(stages, blocks)
    upto = [0.0, *accumulate(costs)]
    # best[i]: highest cost, sum of squares and first blocks of the stages so far, on blocks < i.
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, ()), *[None] * blocks]
    for stage in range(stages):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (blocks + 1)
        left = stages - 1 - stage
        for end in range(stage + 1, blocks - left + 1):
            options = []
            for begin in range(stage, end):
                before = best[begin]
                if before is not None:
                    cost = upto[end] - upto[begin]
                    highest, squares, begins = before
                    options.append((max(highest, cost), squares + cost**2, (*begins, begin)))
            following[end] = min(options)
        best = following
    found = best[blocks]
    assert found is not None
    return tuple(end - begin for begin, end in pairwise((*found[2], blocks)))
