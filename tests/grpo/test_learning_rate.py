# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The learning rate is a function of the optimizer update alone, and settings are obeyed (HB08).

Eight iterations, warm-up over four updates, linear decay to 0; read from metrics.jsonl.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.grpo import tiny

PEAK = 1e-3
EXPECTED = [PEAK * share for share in (0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0)]


@pytest.fixture
def recipe(tmp_path) -> str:
    """The run of HB08, in `tmp_path/run`."""
    config = tiny.tiny_config(
        tiny.write_prompts(tmp_path),
        output=str(tmp_path / "run"),
        sampling={"num_steps": 2, "timestep_fraction": 0.5},
        grpo={"iterations": 8, "group_size": 2, "micro_batch_size": 4},
        optimizer={"lr": PEAK, "lr_warmup_updates": 4, "lr_decay_style": "linear"},
        checkpoint={"interval": 4},
    )
    return tiny.write_recipe(config, tmp_path)


def learning_rates(folder: Path) -> list[float]:
    rows = tiny.metrics_rows(folder / "run")
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["learning_rate"] for row in rows]


def test_straight_resumed_and_accumulated_runs_have_the_same_rates(recipe, tmp_path):
    tiny.train_command(recipe)
    assert learning_rates(tmp_path) == pytest.approx(EXPECTED, abs=1e-12)

    (tmp_path / "resumed").mkdir()
    output = f"--output={tmp_path / 'resumed' / 'run'}"
    tiny.train_command(recipe, [output], killed_in=6)
    assert len(learning_rates(tmp_path / "resumed")) == 5
    tiny.train_command(recipe, [output, "--checkpoint.resume=true"])
    assert learning_rates(tmp_path / "resumed") == learning_rates(tmp_path)

    (tmp_path / "accumulated").mkdir()
    output = f"--output={tmp_path / 'accumulated' / 'run'}"
    tiny.train_command(recipe, [output, "--grpo.micro_batch_size=1", "--grpo.group_size=4"])
    assert learning_rates(tmp_path / "accumulated") == learning_rates(tmp_path)


def _on_ranks(recipe: str, overrides: list[str], **options: Any) -> None:
    tiny.train_command(recipe, overrides, **options)


def test_data_parallel_ranks_do_not_speed_it_up_also_over_a_resume(run_ranks, recipe, tmp_path):
    run_ranks(2, _on_ranks, recipe, [], killed_in=5)
    assert learning_rates(tmp_path) == pytest.approx(EXPECTED[:4], abs=1e-12)
    run_ranks(2, _on_ranks, recipe, ["--checkpoint.resume=true"])
    assert learning_rates(tmp_path) == pytest.approx(EXPECTED, abs=1e-12)


def test_with_two_updates_a_rollout_it_counts_updates_and_still_ends_at_the_end(recipe, tmp_path):
    overrides = ["--grpo.updates_per_rollout=2", "--grpo.clip_range=0.2"]
    tiny.train_command(recipe, overrides, killed_in=5)
    tiny.train_command(recipe, [*overrides, "--checkpoint.resume=true"])
    rows = tiny.metrics_rows(tmp_path / "run")
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
def test_a_resumed_run_obeys_its_own_settings(recipe, tmp_path, override, expected):
    tiny.train_command(recipe, killed_in=5)
    tiny.train_command(recipe, ["--checkpoint.resume=true", override])
    assert learning_rates(tmp_path)[:4] == pytest.approx(EXPECTED[:4], abs=1e-12)
    assert learning_rates(tmp_path)[4:] == pytest.approx(expected, abs=1e-12)
