# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""`overlap.mode=auto`: what the cost model chooses, and that ranks choose alike."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.overlap.calibrate import Calibration
from megatron_leangrpo.overlap.choice import (
    AttentionShape,
    LayerShape,
    choices,
    fastest,
    fastest_groups,
)
from megatron_leangrpo.overlap.commands import print_choices
from megatron_leangrpo.overlap.linear import column_parallel, row_parallel
from megatron_leangrpo.overlap.plan import LinearPlan, prepare
from megatron_leangrpo.overlap.settings import OverlapSettings
from megatron_leangrpo.reporting.console import Console

# An H100 with NVLink as the specification assumes it.
CARD = Calibration(
    device="H100",
    dtype="bfloat16",
    flops_per_second=620e12,
    cut_efficiency={"1": 1.0, "4": 1.0, "8": 0.95, "16": 0.85},
    sum_in_product_slowdown=1.02,
    add_bytes_per_second=1e12,
    link_bytes_per_second=360e9,
    link_latency_seconds=2e-6,
)
FFN = LayerShape(4, 4608, 3072, 3072, 2)
# Wan 14B, 81 frames of 480 x 832, over 4 ranks.
ATTENTION = AttentionShape(4, 32760, 1, 10, 128, 2)


def test_a_layer_that_hides_its_hop_is_cut_and_most_of_it_hidden():
    choice = fastest(FFN, CARD)
    assert choice.flash is not None
    assert choice.exposed_seconds < 0.5 * choice.exposed_without


def test_a_layer_that_small_messages_would_slow_down_stays_whole():
    slow = dataclasses.replace(CARD, link_latency_seconds=1e-3, cut_efficiency={"1": 1, "16": 0.1})
    choice = fastest(FFN, slow)
    assert choice.flash is None and choice.exposed_seconds == choice.exposed_without


def test_the_exchange_of_a_long_attention_is_cut_into_groups_of_heads():
    choice = fastest_groups(ATTENTION, CARD)
    assert choice.flash is not None and choice.flash.sub_slices <= ATTENTION.heads
    assert choice.exposed_seconds < 0.5 * choice.exposed_without


def test_what_cannot_gain_keeps_whole_exchanges():
    one_head = fastest_groups(dataclasses.replace(ATTENTION, heads=1), CARD)
    short = fastest_groups(dataclasses.replace(ATTENTION, tokens=16), CARD)
    for choice in (one_head, short):
        assert choice.flash is None and choice.exposed_seconds == choice.exposed_without


def test_one_rank_has_nothing_to_choose():
    assert fastest(dataclasses.replace(FFN, ranks=1), CARD).flash is None
    assert fastest_groups(dataclasses.replace(ATTENTION, ranks=1), CARD).flash is None


def test_cutting_never_costs_more_than_staying_whole_by_the_model():
    for rows in (1, 64, 4096, 65536):
        for link in (1e9, 20e9, 360e9):
            card = dataclasses.replace(CARD, link_bytes_per_second=link)
            choice = fastest(dataclasses.replace(FFN, rows=rows), card)
            assert choice.exposed_seconds <= choice.exposed_without


def test_what_was_chosen_is_printed_with_what_it_leaves_exposed(capsys):
    chosen = {FFN: fastest(FFN, CARD), ATTENTION: fastest_groups(ATTENTION, CARD)}
    print_choices(Console(), chosen)
    out = capsys.readouterr().out
    assert "4608 x 3072 x 3072" in out and "flash" in out and "exposed" in out
    assert "attention of 32760, 10 x 128" in out and "groups of heads" in out


def test_auto_needs_a_calibration():
    with pytest.raises(
        ValueError, match=r"overlap\.mode is auto, which needs overlap\.calibration"
    ):
        OverlapSettings("auto")


def _auto(path: str) -> tuple[torch.Tensor, list]:
    platform.initialize_distributed(2)
    plan = LinearPlan(platform.tp_group(), True, None, "fc", calibration=path)
    prepare(plan)
    x = torch.ones(4096, 1, 64, requires_grad=True)
    (hidden,) = column_parallel(x, [torch.ones(128, 64)], [None], plan)
    out = row_parallel([hidden], [torch.ones(64, 128)], None, plan)
    out.sum().backward()
    return torch.stack((out[0, 0], x.grad[0, 0])), list(choices().values())


def test_ranks_choose_alike_and_the_result_is_the_linear(run_ranks, tmp_path):
    path = tmp_path / "calibration.json"
    # About as slow as a host, so that products are longer than messages.
    dataclasses.replace(CARD, flops_per_second=2e10, link_bytes_per_second=1e9).save(path)
    (values, chosen), other = run_ranks(2, _auto, str(path))
    assert torch.equal(values, torch.full((2, 64), 64.0 * 256))
    # Both linears have one shape: 64 whole features, 128 sharded ones.
    assert len(chosen) == 1 and chosen[0].flash is not None
    assert torch.equal(other[0], values) and other[1] == chosen


def _two_runs(paths: list[str]) -> list:
    chosen = [_auto(path)[1] for path in paths]
    platform.initialize_distributed(2)
    assert not choices()
    return chosen


def test_nothing_is_left_of_an_earlier_run_in_the_process(run_ranks, tmp_path):
    """A run after another in one process: tests do so, and whoever calls us as a library."""
    paths = [str(tmp_path / name) for name in ("slow.json", "fast.json")]
    slow = dataclasses.replace(CARD, flops_per_second=2e10, link_bytes_per_second=1e9)
    slow.save(paths[0])
    dataclasses.replace(slow, link_bytes_per_second=1e15, link_latency_seconds=0.0).save(paths[1])
    for first, second in run_ranks(2, _two_runs, paths):
        assert len(first) == len(second) == 1
        assert first[0].flash is not None and second[0].flash is None
    # The same file, measured again.
    slow.save(paths[1])
    for first, second in run_ranks(2, _two_runs, paths):
        assert first == second


def _without_a_link(path: str) -> str:
    platform.initialize_distributed(2)
    try:
        prepare(LinearPlan(platform.tp_group(), True, None, "fc", calibration=path))
    except ValueError as error:
        return str(error)
    return ""


def test_a_calibration_of_one_device_is_refused_on_every_rank(run_ranks, tmp_path):
    path = tmp_path / "alone.json"
    dataclasses.replace(CARD, link_bytes_per_second=None).save(path)
    for error in run_ranks(2, _without_a_link, str(path)):
        assert "overlap.calibration" in error and "one device" in error
