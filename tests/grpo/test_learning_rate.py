# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The learning rate is a function of the optimizer update alone, and settings are obeyed (HB08).

Eight iterations, warm-up over four updates, linear decay to 0; read from metrics.jsonl.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.grpo import tiny

PEAK = 1e-3
EXPECTED = [PEAK * share for share in (0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> str:
    """The run of HB08."""
    folder = tmp_path_factory.mktemp("recipe")
    config = tiny.tiny_config(
        tiny.write_prompts(folder),
        sampling={"num_steps": 2, "timestep_fraction": 0.5},
        grpo={"iterations": 8, "group_size": 2, "micro_batch_size": 4},
        optimizer={"lr": PEAK, "lr_warmup_updates": 4, "lr_decay_style": "linear"},
        checkpoint={"interval": 4},
    )
    return tiny.write_recipe(config, folder)


@pytest.fixture(scope="module")
def stopped(recipe, tmp_path_factory) -> Path:
    """That run, stopped in iteration 6; take a copy."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    tiny.train_command(recipe, [f"--output={run}"], killed_in=6)
    assert len(learning_rates(run)) == 5
    return run


def resume_copy(recipe: str, stopped: Path, run: Path, *overrides: str) -> list[float]:
    shutil.copytree(stopped, run)
    tiny.train_command(recipe, [f"--output={run}", "--checkpoint.resume=true", *overrides])
    return learning_rates(run)


def learning_rates(run: Path) -> list[float]:
    rows = tiny.metrics_rows(run)
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["learning_rate"] for row in rows]


def test_straight_resumed_and_accumulated_runs_have_the_same_rates(recipe, stopped, tmp_path):
    straight, accumulated = tmp_path / "straight", tmp_path / "accumulated"
    tiny.train_command(recipe, [f"--output={straight}"])
    assert learning_rates(straight) == pytest.approx(EXPECTED, abs=1e-12)
    assert resume_copy(recipe, stopped, tmp_path / "resumed") == learning_rates(straight)
    more = ["--grpo.micro_batch_size=1", "--grpo.group_size=4"]
    tiny.train_command(recipe, [f"--output={accumulated}", *more])
    assert learning_rates(accumulated) == learning_rates(straight)


def test_data_parallel_ranks_do_not_speed_it_up_also_over_a_resume(run_ranks, recipe, tmp_path):
    run = tmp_path / "run"
    run_ranks(2, tiny.train_command, recipe, [f"--output={run}"], killed_in=5)
    assert learning_rates(run) == pytest.approx(EXPECTED[:4], abs=1e-12)
    resume = [f"--output={run}", "--checkpoint.resume=true"]
    run_ranks(2, tiny.train_command, recipe, resume)
    assert learning_rates(run) == pytest.approx(EXPECTED, abs=1e-12)


def test_with_two_updates_a_rollout_it_counts_updates_and_still_ends_at_the_end(recipe, tmp_path):
    run = tmp_path / "run"
    overrides = [f"--output={run}", "--grpo.updates_per_rollout=2", "--grpo.clip_range=0.2"]
    tiny.train_command(recipe, overrides, killed_in=5)
    tiny.train_command(recipe, [*overrides, "--checkpoint.resume=true"])
    rows = tiny.metrics_rows(run)
    rates = [r for row in rows for r in (row["learning_rate"], row["update_2/learning_rate"])]
    warm_up = [PEAK * n / 4 for n in (1, 2, 3, 4)]
    decay = [PEAK * n / 12 for n in range(11, -1, -1)]
    assert rates == pytest.approx(warm_up + decay, abs=1e-12)
    assert all(row["ratio_min"] <= row["update_2/ratio_min"] <= row["ratio_max"] for row in rows)
    assert all(row["update_2/grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--optimizer.lr=5e-4", [r / 2 for r in EXPECTED[4:]]),
        ("--optimizer.min_lr=1e-4", [7.75e-4, 5.5e-4, 3.25e-4, 1e-4]),
        ("--optimizer.lr_decay_style=constant", [PEAK] * 4),
    ],
)
def test_a_resumed_run_obeys_its_own_settings(recipe, stopped, tmp_path, override, expected):
    rates = resume_copy(recipe, stopped, tmp_path / "run", override)
    assert rates == pytest.approx([*EXPECTED[:4], *expected], abs=1e-12)
