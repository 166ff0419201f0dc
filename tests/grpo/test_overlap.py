# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A run with overlapped collectives has the gradients of the run without, on every schedule."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_leangrpo import platform
from tests.grpo import tiny

OFF, FLASH = {"overlap": {"mode": "off"}}, {"overlap": {"mode": "flash"}}
TENSOR: dict[str, dict[str, Any]] = {
    "off": OFF,
    "bulk": {"overlap": {"mode": "bulk"}},
    "flash": FLASH,
    "direct": {"overlap": {"mode": "flash", "pattern": "direct", "sub_slices": 1}},
    "queries split": {**FLASH, "model": {"recompute_granularity": "selective"}},
}
# Reweight takes one trajectory a forward.
ALONE = {"grpo": {"micro_batch_size": 1}}
CONTEXT = {"off": {**OFF, **ALONE}, "flash": {**FLASH, **ALONE}}


def _gradients(
    prompts: str, parallel: dict[str, int], cases: dict[str, dict[str, Any]], schedules: list[str]
) -> dict[str, dict[str, Any]]:
    results = {}
    for name, sections in cases.items():
        config = tiny.tiny_config(prompts, parallel=parallel, sampling={"num_steps": 3}, **sections)
        experiment = tiny.start(config)
        replay, metrics = tiny.first_gradient(experiment, "replay")
        others = [tiny.first_gradient(experiment, schedule)[0] for schedule in schedules]
        results[name] = {
            "gradient": replay,
            "schedules": max(tiny.worst(other, replay)[0] for other in others),
            "ratios": (metrics["ratio_min"], metrics["ratio_max"]),
        }
    return results


def test_gradients_are_those_without_overlap_and_retained_graphs_keep_theirs(
    run_ranks, tmp_path_factory
):
    prompts = tiny.write_prompts(tmp_path_factory.mktemp("prompts"))
    parallel = {"tensor_model_parallel_size": 2}
    results = run_ranks(2, _gradients, prompts, parallel, TENSOR, ["retain"])[0]
    for name, result in results.items():
        # Sums over ranks in another order, in float32.
        assert tiny.worst(result["gradient"], results["off"]["gradient"])[0] < 1e-5, name
        assert result["schedules"] < 1e-6, name
        assert result["ratios"] == (1.0, 1.0), name


def test_overlapped_ulysses_changes_no_bit_of_a_gradient_on_any_schedule(
    run_ranks, tmp_path_factory
):
    prompts = tiny.write_prompts(tmp_path_factory.mktemp("prompts"))
    parallel = {"context_parallel_size": 2}
    results = run_ranks(2, _gradients, prompts, parallel, CONTEXT, ["retain", "reweight"])[0]
    assert tiny.worst(results["flash"]["gradient"], results["off"]["gradient"])[0] == 0
    for name, result in results.items():
        assert result["schedules"] < 1e-6, name
        assert result["ratios"] == (1.0, 1.0), name


@pytest.fixture(autouse=True)
def _leave():
    yield
    platform.destroy_distributed()


def test_a_wrong_setting_is_named_with_what_would_be_valid(leangrpo):
    leangrpo.refuses(
        ["overlap.sub_slices is 17", "from 1 to 16"],
        *("train", "flux_tiny", "--dry-run", "--overlap.sub_slices=17"),
    )
    leangrpo.refuses(
        ["overlap.mode", "'flash'"], "train", "flux_tiny", "--dry-run", "--overlap.mode=fast"
    )
    leangrpo.refuses(
        ["overlap.mode is auto", "overlap.calibration"],
        *("train", "flux_tiny", "--dry-run", "--overlap.mode=auto"),
    )
