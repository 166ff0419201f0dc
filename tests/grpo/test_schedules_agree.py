# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Replay and retain give one gradient, and every layout gives the same one."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_leangrpo import platform
from tests.grpo import tiny

# The same forward, backward once against a kept and once against a rebuilt graph, per tensor.
BETWEEN_SCHEDULES = {"float32": 1e-6, "float64": 1e-12}
# Sums over ranks and matrix products of other shapes round in another order.
BETWEEN_LAYOUTS = {"float32": 1e-5, "float64": 1e-11}
# World size, tensor- and context-parallel size, the first case (placement matters with data
# parallel only), and how collectives are overlapped.
LAYOUTS = {
    "tp 2": (2, 2, 1, 2, "off"),
    "dp 2": (2, 1, 1, 0, "off"),
    "cp 2": (2, 1, 2, 3, "off"),
    "tp 2 dp 2": (4, 2, 1, 1, "bulk"),
    "tp 4": (4, 4, 1, 3, "flash"),
    "tp 2 cp 2": (4, 2, 2, 3, "flash"),
}
# A rank has 4 of 8 samples at data-parallel size 2: 2 divides, 3 does not, 8 is more.
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "spread, 2 at a time": {"grpo": {"placement": "spread", "micro_batch_size": 2}},
    "local, 3 at a time": {"grpo": {"placement": "local", "micro_batch_size": 3}},
    "spread, 3 at a time, recompute attention, a random fraction for each sample": {
        "model": {"recompute_granularity": "selective"},
        "sampling": {"step_selection": "random_fraction", "num_steps": 4, "timestep_fraction": 0.7},
        "grpo": {"micro_batch_size": 3},
    },
    "local, 8 at a time, recompute blocks, statistics of all groups": {
        "model": {"recompute_granularity": "full"},
        "grpo": {"placement": "local", "micro_batch_size": 8, "advantage": "flow_grpo_global_std"},
    },
    "windows, whole tokens, GRPO-Guard": {
        "parallel": {"sequence_parallel": False},
        "sampling": {"step_selection": "window", "window_size": 1, "window_starts": [0, 1]},
        "grpo": {"ratio_norm": "grpo_guard"},
    },
}


def _gradients(
    prompts: str,
    dtype: str,
    tensor_parallel: int,
    context_parallel: int = 1,
    first_case: int = 0,
    overlap: str = "off",
) -> dict[str, dict[str, Any]]:
    """By case: the gradient by replay, how far retain is from it, and the ratios."""
    results = {}
    for case, sections in list(CASES.items())[first_case:]:
        defaults = {
            "model": {"dtype": dtype},
            "parallel": {
                "tensor_model_parallel_size": tensor_parallel,
                "context_parallel_size": context_parallel,
            },
            "sampling": {"num_steps": 3},
            "overlap": {"mode": overlap},
        }
        merged = {
            name: {**defaults.get(name, {}), **sections.get(name, {})}
            for name in defaults.keys() | sections.keys()
        }
        experiment = tiny.start(tiny.tiny_config(prompts, **merged))
        replay, metrics = tiny.first_gradient(experiment, "replay")
        retain, _ = tiny.first_gradient(experiment, "retain")
        results[case] = {
            "gradient": replay,
            "schedules": tiny.worst(retain, replay),
            "ratios": (metrics["ratio_min"], metrics["ratio_max"]),
        }
    return results


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    return tiny.write_prompts(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def alone(prompts) -> dict[str, dict[str, dict[str, Any]]]:
    """Every case at every precision in one process."""
    results = {dtype: _gradients(prompts, dtype, 1) for dtype in BETWEEN_SCHEDULES}
    platform.destroy_distributed()
    return results


@pytest.mark.parametrize("dtype", BETWEEN_SCHEDULES)
def test_in_one_process_retain_equals_replay_and_ratios_are_one(alone, dtype):
    for case, result in alone[dtype].items():
        error, name = result["schedules"]
        assert error <= BETWEEN_SCHEDULES[dtype], (case, name)
        assert result["ratios"] == (1.0, 1.0), case


@pytest.mark.parametrize("dtype", BETWEEN_SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout_both_schedules_give_the_gradient_of_one_process(
    run_ranks, prompts, alone, layout, dtype
):
    world, *arguments = LAYOUTS[layout]
    for rank, results in enumerate(run_ranks(world, _gradients, prompts, dtype, *arguments)):
        for case, result in results.items():
            error, name = result["schedules"]
            assert error <= BETWEEN_SCHEDULES[dtype], (rank, case, name)
            assert result["ratios"] == (1.0, 1.0), (rank, case)
            error, name = tiny.worst(result["gradient"], alone[dtype][case]["gradient"])
            assert error <= BETWEEN_LAYOUTS[dtype], (rank, case, name)
