# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Groups are complete, dealt evenly, and named the same way whatever the layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_leangrpo.conditioning.prompts import Prompt
from megatron_leangrpo.grpo.placement import Group, place


def groups(count):
    return [Group(i, Prompt(id=10 + i, text="same text")) for i in range(count)]


def all_waves(count, group_size, dp_size, **options):
    return [
        place(groups(count), group_size, dp_rank=rank, dp_size=dp_size, **options)
        for rank in range(dp_size)
    ]


layouts = st.tuples(
    st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)
)


@given(layouts, st.sampled_from(["spread", "local"]))
def test_every_member_of_every_group_is_rolled_out_exactly_once(layout, placement):
    per_rank, share, dp_size, updates, micro_batch = layout
    placements = all_waves(
        per_rank * dp_size,
        share * updates,
        dp_size,
        placement=placement,
        updates=updates,
        micro_batch_size=micro_batch,
    )
    slots = [(s.group, s.member) for p in placements for w in p.waves for s in w.slots]
    expected = [(g, m) for g in range(per_rank * dp_size) for m in range(share * updates)]
    assert sorted(slots) == expected
    shapes = {tuple((w.index, w.minibatch, len(w.slots)) for w in p.waves) for p in placements}
    assert len(shapes) == 1, "all ranks run the same number of equal waves"
    assert len({p.completed_by for p in placements}) == 1


@given(layouts)
def test_minibatch_membership_does_not_depend_on_the_layout(layout):
    per_rank, share, dp_size, updates, micro_batch = layout
    options = {"updates": updates, "seed": 3, "iteration": 5}
    count, size = per_rank * dp_size, share * updates

    def membership(placements):
        return {
            (s.group, s.member): w.minibatch for p in placements for w in p.waves for s in w.slots
        }

    alone = membership(all_waves(count, size, 1, **options))
    spread = membership(all_waves(count, size, dp_size, micro_batch_size=micro_batch, **options))
    assert alone == spread
    for group in range(count):
        members = [alone[group, m] for m in range(size)]
        assert all(members.count(u) == share for u in range(updates))


def test_spread_completes_a_group_in_one_wave_and_local_keeps_it_on_one_rank():
    spread = all_waves(2, 4, 4, placement="spread")
    assert spread[0].completed_by == (0, 1)
    local = all_waves(4, 4, 4, placement="local")
    assert [{s.group for w in p.waves for s in w.slots} for p in local] == [{0}, {1}, {2}, {3}]
    assert local[0].completed_by == (3, 3, 3, 3)


def test_the_first_minibatch_rolls_out_last():
    waves = all_waves(2, 4, 1, updates=2, micro_batch_size=2)[0].waves
    assert [w.minibatch for w in waves] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"count": 3, "group_size": 3, "dp_size": 2}, ["grpo.prompts_per_iteration", "[2, 4]"]),
        (
            {"count": 3, "group_size": 4, "dp_size": 2, "placement": "local"},
            ["grpo.placement", "[2, 4]"],
        ),
        (
            {"count": 2, "group_size": 4, "dp_size": 1, "updates": 3},
            ["grpo.updates_per_rollout = 3", "[1, 2, 4]"],
        ),
        ({"count": 2, "group_size": 0, "dp_size": 1}, ["grpo.group_size = 0"]),
    ],
)
def test_what_cannot_be_dealt_is_refused_with_the_nearest_valid_values(arguments, names):
    with pytest.raises(ValueError) as error:
        all_waves(arguments.pop("count"), arguments.pop("group_size"), **arguments)
    assert all(name in str(error.value) for name in names)
