# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl and TensorBoard."""

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_leangrpo.reporting.metrics import REQUIRED_KEYS, MetricsWriter, tag
from megatron_leangrpo.reporting.run_directory import RunDirectory


def metrics(**changes):
    return {**dict.fromkeys(REQUIRED_KEYS, 1.0), "schedule": "retain", **changes}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path / "run", "flux_tiny")
    directory.write_config("")
    return directory


def read_tensorboard(directory: RunDirectory, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory.tensorboard))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_an_iteration_is_one_line_and_one_point(directory):
    writer = MetricsWriter(directory)
    writer.write_scalars(0, {"eval_reward": 0.25})
    writer.write(1, metrics(reward_mean=torch.tensor(0.5), reward_ocr=0.5))
    writer.close()
    (line,) = directory.metrics.read_text().splitlines()
    row = json.loads(line)
    assert row["iteration"] == 1
    assert row["reward_mean"] == 0.5
    assert next(iter(row)) == "iteration"
    assert set(REQUIRED_KEYS) <= set(row)
    assert read_tensorboard(directory, "reward/mean") == [(1, 0.5)]
    assert read_tensorboard(directory, "eval/reward") == [(0, 0.25)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_a_number_that_is_not_finite_is_null(directory, value):
    writer = MetricsWriter(directory)
    writer.write(1, metrics(grad_norm=value))
    writer.close()
    assert json.loads(directory.metrics.read_text())["grad_norm"] is None


def test_a_forgotten_metric_is_caught(directory):
    writer = MetricsWriter(directory)
    with pytest.raises(AssertionError, match="grad_norm"):
        writer.write(1, {key: 1.0 for key in REQUIRED_KEYS if key != "grad_norm"})
    writer.close()


def test_a_resumed_run_has_each_iteration_once(directory):
    first = MetricsWriter(directory)
    for iteration in (1, 2, 3):
        first.write(iteration, metrics(reward_mean=1.0))
    first.close()
    second = MetricsWriter(directory, completed_iterations=2)
    for iteration in (3, 4):
        second.write(iteration, metrics(reward_mean=2.0))
    second.close()
    rows = [(row["iteration"], row["reward_mean"]) for row in directory.metrics_rows()]
    assert rows == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert read_tensorboard(directory, "reward/mean") == rows


def test_tags_group_what_belongs_together():
    assert tag("reward_mean") == "reward/mean"
    assert tag("time_total") == "time/total"
    assert tag("eval_reward_ocr") == "eval/reward_ocr"
    assert tag("grad_norm") == "train/grad_norm"
    assert tag("update_2/grad_norm") == "update_2/grad_norm"


def test_asking_for_wandb_without_the_package_names_the_extra(directory, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ValueError, match=r"wandb=true .* 'megatron-leangrpo\[wandb\]'"):
        MetricsWriter(directory, wandb_config={})
