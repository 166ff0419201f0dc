# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""curves.png."""

import warnings

import pytest
from PIL import Image

from megatron_leangrpo.reporting.curves import save_curves


def row(iteration: int, reward: float | None = 0.5):
    return {
        "iteration": iteration,
        "reward_mean": reward,
        "reward_std": 0.1,
        "grad_norm": 1.0,
        "time_rollout": 0.3,
        "time_reward": 0.1,
        "time_update": 0.2,
    }


@pytest.mark.parametrize(
    ("rows", "evaluations"),
    [
        ([], {}),
        ([], {0: 0.5}),
        ([row(1)], {0: 0.5, 1: 0.6}),
        ([row(1, None), row(2), row(3)], {0: 0.5, 3: 0.6}),
        ([row(n) for n in range(21, 60)], {60: 0.7}),
    ],
    ids=["nothing", "before", "one", "missing", "resumed"],
)
def test_curves_are_drawn_without_complaint_however_few_points(tmp_path, rows, evaluations):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_curves(tmp_path / "curves.png", rows, evaluations, "title")
    assert Image.open(tmp_path / "curves.png").size == (1320, 900)
