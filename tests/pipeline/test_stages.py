# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Splits are as even as they can be, and wrong ones are told with what would be valid."""

import itertools
import random

import pytest

from megatron_leangrpo.pipeline.stages import (
    balanced_split,
    check_split,
    check_stages,
)


def highest(costs, split) -> float:
    begin, worst = 0, 0.0
    for count in split:
        worst = max(worst, sum(costs[begin : begin + count]))
        begin += count
    return worst


def test_equal_blocks_are_split_evenly():
    assert sorted(balanced_split([1.0] * 57, 4)) == [14, 14, 14, 15]
    assert balanced_split([1.0] * 6, 3) == (2, 2, 2)


def test_no_other_split_is_better():
    draw = random.Random(1)
    for _ in range(20):
        stages, blocks = draw.randint(1, 4), draw.randint(4, 8)
        costs = [draw.uniform(1, 3) for _ in range(blocks)]
        cuts = itertools.combinations(range(1, blocks), stages - 1)
        splits = [tuple(b - a for a, b in itertools.pairwise((0, *cut, blocks))) for cut in cuts]
        best = min(highest(costs, split) for split in splits)
        assert highest(costs, balanced_split(costs, stages)) == pytest.approx(best)


def test_embedders_and_output_take_blocks_from_the_ends():
    ends = [3.0, *[1.0] * 9, 3.0]
    assert balanced_split(ends, 3) == (3, 5, 3)


def test_a_split_that_does_not_add_up_is_told_with_one_that_does():
    assert check_split([3, 2, 1], 3, 6) == (3, 2, 1)
    for split, problem in (
        ([3, 2], "has 2 numbers for 3 stages"),
        ([3, 2, 2], "adds up to 7, but the transformer has 6 blocks"),
        ([4, 2, 0], "leaves a stage without a block"),
    ):
        with pytest.raises(ValueError) as error:
            check_split(split, 3, 6)
        message = str(error.value)
        assert f"parallel.pipeline_split is {split}" in message and problem in message
        assert "as [2, 2, 2]" in message


def test_more_stages_than_blocks_are_told_with_the_valid_numbers():
    with pytest.raises(ValueError, match=r"pipeline_model_parallel_size is 8.*6 blocks.*1 to 6"):
        check_stages(8, 6)
    with pytest.raises(ValueError, match=r"valid values: 1$"):
        check_stages(2, 1)
    with pytest.raises(ValueError, match="size is 0"):
        check_stages(0, 6)
