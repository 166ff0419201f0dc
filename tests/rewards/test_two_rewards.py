# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The tiny FLUX trains on two rewards at once, legible digits of a given colour."""

import json
from pathlib import Path

import pytest

from megatron_leangrpo.rewards.ocr import INSTALL_LINE, ocr_available

REWARDS = ("ocr_recognizer", "color")


@pytest.mark.slow
@pytest.mark.skipif(not ocr_available(), reason=INSTALL_LINE)
def test_neither_of_two_rewards_falls_and_colour_rises(leangrpo):
    outcome = leangrpo(
        "train",
        "flux_tiny_two",
        "--grpo.iterations=15",
        "--evaluation.interval=15",
        "--evaluation.samples_per_prompt=8",
        "--evaluation.micro_batch_size=80",
        "--checkpoint.interval=-1",
        "--output=run",
    )
    assert outcome.status == 0, outcome.err
    before, after = json.loads(Path("run/summary.json").read_text())["evaluations"]
    gains = {name: after["rewards"][name] - before["rewards"][name] for name in REWARDS}
    # Seen on one rank: 0.15 -> 0.29 of colour and 0.54 -> 0.56 of the text; 40 iterations go on.
    assert gains["color"] > 0.05 and gains["ocr_recognizer"] > -0.05, gains
