# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""For every world and group size groups are complete, and a resume at any step changes none."""

from __future__ import annotations

from itertools import count

import pytest

from megatron_leangrpo.conditioning.prompts import Prompt, PromptSampler
from megatron_leangrpo.grpo.placement import Group, place

LINES = [Prompt(n, f"the number {n}") for n in range(7)]
STEPS = 6


@pytest.mark.parametrize("placement", ["spread", "local"])
@pytest.mark.parametrize("world", range(1, 17))
def test_groups_are_complete_on_every_number_of_ranks(world, placement):
    for group_size in range(2, 25):
        share = group_size if placement == "spread" else 1
        # The fewest groups that can be dealt evenly; also more of them than there are prompts.
        per_iteration = next(n for n in count(1) if n * share % world == 0)
        straight = PromptSampler(LINES, per_iteration, seed=world)
        for step in (0, 1):
            drawn = straight.batch(step)
            groups = [Group(n, prompt) for n, prompt in enumerate(drawn)]
            slots = [
                (slot.prompt_id, slot.member)
                for rank in range(world)
                for wave in place(
                    groups, group_size, dp_rank=rank, dp_size=world, placement=placement
                ).waves
                for slot in wave.slots
            ]
            ids = [prompt.id for prompt in drawn]
            assert len(set(ids)) == per_iteration
            assert sorted(slots) == sorted((i, m) for i in ids for m in range(group_size))


@pytest.mark.parametrize("per_iteration", range(1, 17))
def test_a_sampler_that_starts_at_any_step_draws_what_one_that_ran_on_does(per_iteration):
    straight = PromptSampler(LINES, per_iteration, seed=3)
    expected = [straight.batch(step) for step in range(STEPS)]
    for start in range(STEPS):
        resumed = PromptSampler(LINES, per_iteration, seed=3)
        assert [resumed.batch(step) for step in range(start, STEPS)] == expected[start:]
