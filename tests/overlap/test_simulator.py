# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The published setting, the closed forms against the simulator, and orders that must not end."""

import random

import pytest

from megatron_leangrpo.overlap.cost_model import (
    Costs,
    Flash,
    attention_time,
    bulk_backward_time,
    exposed,
    flash_time,
    hiding_features,
    none_time,
    slicing_time,
)
from megatron_leangrpo.overlap.schedule import Message, Step, all_gather_steps, reduce_scatter_steps
from megatron_leangrpo.overlap.simulated_attention import simulate_attention
from megatron_leangrpo.overlap.simulator import (
    DeadlockError,
    end_of,
    simulate_flash,
    simulate_none,
    simulate_slicing,
)

PUBLISHED = Costs.of_layer(ranks=4, compute=77.0, collective=43.8, add=0.1)
FLASH = [
    Flash(pattern=pattern, sub_slices=m, in_product=in_product)
    for pattern, in_product in (("ring", False), ("ring", True), ("direct", False))
    for m in (1, 2, 4)
]


def _settings(count: int) -> list[tuple[Costs, str, Flash]]:
    draw = random.Random(0)
    return [
        (
            Costs(
                ranks=draw.randint(1, 8),
                compute=10.0,
                hop=10 * 10 ** draw.uniform(-1, 0.6),
                latency=draw.uniform(0, 0.3),
                add=draw.uniform(0, 1),
            ),
            draw.choice(["all-gather", "reduce-scatter"]),
            draw.choice(FLASH),
        )
        for _ in range(count)
    ]


def test_the_published_setting_exposes_what_was_published():
    scatter = "reduce-scatter"
    times = {
        "none": simulate_none(PUBLISHED, scatter),
        "slicing": simulate_slicing(PUBLISHED, scatter, chunks=8, chunk_cost=1.6),
        "flash": simulate_flash(PUBLISHED, scatter, Flash()),
        "all-gather": simulate_flash(PUBLISHED, "all-gather", Flash()),
    }
    missing = {name: exposed(end_of(spans), PUBLISHED) for name, spans in times.items()}
    assert missing["none"] == pytest.approx(43.8)
    assert missing["slicing"] == pytest.approx(7.1, abs=0.05)
    assert missing["flash"] == pytest.approx(0.1)
    assert missing["all-gather"] == pytest.approx(0.0, abs=1e-9)


def test_half_the_compute_leaves_what_no_order_can_hide():
    costs = Costs.of_layer(ranks=4, compute=38.5, collective=43.8, add=0.1)
    time = end_of(simulate_flash(costs, "reduce-scatter", Flash()))
    assert exposed(time, costs) == pytest.approx(15.2, abs=0.05)


def test_sub_slices_shrink_what_stays_exposed_where_the_link_is_slower():
    costs = Costs(ranks=4, compute=7, hop=10, add=0.3)
    times = [flash_time(costs, "reduce-scatter", Flash(sub_slices=m)) for m in (1, 2, 4)]
    assert [exposed(time, costs) for time in times] == pytest.approx([9.9, 5.65, 3.825])


def test_closed_forms_agree_with_the_simulator_over_three_hundred_settings():
    for costs, collective, flash in _settings(300):
        simulated = end_of(simulate_flash(costs, collective, flash))
        assert flash_time(costs, collective, flash) == pytest.approx(simulated, rel=0.02), (
            costs,
            collective,
            flash,
        )


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_closed_forms_of_no_overlap_and_of_slicing_agree_with_the_simulator(chunks):
    for costs, collective, _ in _settings(20):
        assert none_time(costs) == pytest.approx(end_of(simulate_none(costs, collective)))
        simulated = end_of(simulate_slicing(costs, collective, chunks, 0.2))
        assert slicing_time(costs, chunks, 0.2) == pytest.approx(simulated)


def test_no_mode_beats_the_bounds_of_compute_and_link():
    for costs, collective, flash in _settings(50):
        least = max(costs.compute_total, (costs.ranks - 1) * costs.hop)
        assert flash_time(costs, collective, flash) >= least - 1e-9


def test_a_sum_in_the_product_leaves_nothing_where_a_hop_fits_between_products():
    costs = Costs(ranks=4, compute=10, hop=7.4, add=0.5)
    flash = Flash(sub_slices=4, in_product=True)
    assert exposed(flash_time(costs, "reduce-scatter", flash), costs) == pytest.approx(0)


def test_sixty_four_ranks_are_simulated():
    costs = Costs(ranks=64, compute=1.0, hop=0.9, add=0.01)
    time = end_of(simulate_flash(costs, "reduce-scatter", Flash()))
    assert time == pytest.approx(flash_time(costs, "reduce-scatter", Flash()))


def test_a_rank_that_swaps_two_steps_is_a_deadlock():
    steps = [reduce_scatter_steps(rank, 4, "ring") for rank in range(4)]
    first, second, third, last = steps[2]
    steps[2] = [first, third, second, last]
    with pytest.raises(DeadlockError, match="waits for itself"):
        simulate_flash(PUBLISHED, "reduce-scatter", Flash(), steps)


def test_a_receive_that_nobody_sends_is_a_deadlock():
    steps = [all_gather_steps(rank, 2, "ring") for rank in range(2)]
    steps[1] = [Step(1, None), Step(0, Message(0, 1, 0, 0))]
    steps[0] = [Step(0, None), Step(1, None)]
    costs = Costs(ranks=2, compute=1.0, hop=1.0)
    with pytest.raises(DeadlockError, match="never sent"):
        simulate_flash(costs, "all-gather", Flash(), steps)


def test_bulk_backward_hides_a_gather_and_a_reduction_behind_one_product_each():
    assert bulk_backward_time(all_gather=22, dgrad=40, reduce_scatter=22, wgrad=40) == 80
    assert bulk_backward_time(all_gather=60, dgrad=40, reduce_scatter=60, wgrad=40) == 120


def test_a_slice_hides_its_hop_from_a_number_of_features_on():
    features = hiding_features(620e12, 360e9, 2)
    costs = Costs(
        ranks=4,
        compute=2 * 1000 * features * 3072 / 620e12,
        hop=1000 * 3072 * 2 / 360e9,
    )
    assert features == pytest.approx(1722, abs=1)
    assert costs.compute == pytest.approx(costs.hop)


def test_closed_form_and_simulator_of_an_attention_between_exchanges_agree():
    for costs, _, flash in _settings(300):
        played = end_of(simulate_attention(costs, flash.sub_slices))
        assert attention_time(costs, flash.sub_slices) == pytest.approx(played)


def test_groups_of_heads_hide_all_but_the_ways_of_the_first_and_the_last():
    costs = Costs(ranks=4, compute=10.0, hop=8.0)
    times = [attention_time(costs, groups) for groups in (1, 2, 4, 8)]
    assert [exposed(time, costs) for time in times] == pytest.approx([24.0, 12.0, 6.0, 3.0])
