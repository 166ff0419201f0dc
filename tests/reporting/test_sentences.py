# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The sentences a person reads."""

import pytest

from megatron_leangrpo.reporting.sentences import (
    byte_size,
    evaluation_line,
    final_line,
    iteration_line,
    number,
    seconds,
)

METRICS = {
    "reward_mean": 0.6123,
    "reward_std": 0.21,
    "reward_ocr": 0.6123,
    "zero_std_ratio": 0.0,
    "grad_norm": 0.84,
    "ratio_min": 1.0,
    "ratio_max": 1.0,
    "time_rollout": 0.5,
    "time_reward": 0.2,
    "time_update": 0.3,
    "time_total": 1.02,
    "samples_per_second": 62.7,
}


def test_the_last_line_says_what_was_achieved():
    summary = {
        "eval_reward_before": 0.596,
        "eval_reward_after": 0.8124,
        "eval_correct_before": 0.63,
        "eval_correct_after": 0.85,
        "correct_means": "read correctly",
        "seconds": 41.2,
    }
    assert final_line(summary, "runs/flux_tiny-1/samples") == (
        "reward 0.60 -> 0.81, 63 % -> 85 % read correctly, 41 s; "
        "pictures in runs/flux_tiny-1/samples"
    )
    del summary["eval_correct_after"]
    assert "%" not in final_line(summary, "s")


def test_a_small_reward_keeps_its_digits():
    """JPEG sizes are in megabytes."""
    summary = {"eval_reward_before": -0.002345, "eval_reward_after": -0.0011, "seconds": 5}
    assert final_line(summary, "s").startswith("reward -0.00234 -> -0.0011, ")


def test_an_on_policy_iteration_is_short():
    assert iteration_line(3, 40, METRICS) == (
        "iteration  3/40  reward 0.612 ± 0.210  grad 0.840  "
        "1.02 s (rollout 0.500, reward 0.200, update 0.300)  62.7 images/s"
    )


def test_an_iteration_says_what_is_unusual():
    line = iteration_line(
        3,
        40,
        {
            **METRICS,
            "zero_std_ratio": 0.25,
            "ratio_min": 0.999,
            "ratio_max": 1.0002,
            "reward_jpeg": -1.5,
            "grad_norm": None,
        },
    )
    assert "25 % of groups constant" in line
    assert "ratio 0.9990 to 1.0002" in line
    assert "(ocr 0.612, jpeg -1.500)" in line
    assert "grad -" in line


def test_evaluations_say_what_is_counted():
    assert evaluation_line(10, 0.7, 0.75, "read correctly") == (
        "evaluation after iteration 10: reward 0.700, 75 % read correctly"
    )
    assert evaluation_line(10, 0.7, None, "") == "evaluation after iteration 10: reward 0.700"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0.000"), (1e-5, "1.00e-05"), (12.34, "12.3"), (3e7, "3.00e+07")]
)
def test_numbers_are_readable(value, text):
    assert number(value) == text


def test_quantities_have_the_unit_a_person_would_use():
    assert [seconds(s) for s in (1.5, 41.2, 600, 9000)] == ["1.50 s", "41 s", "10 min", "2.5 h"]
    assert [byte_size(b) for b in (512, 2**20, 3.5 * 2**40)] == ["512 B", "1.0 MiB", "3.5 TiB"]
