# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Predicted peaks of pipeline stages against the allocator's events on every stage's rank."""

import pytest

from megatron_leangrpo.planner.workload import Ranks
from tests.grpo import tiny
from tests.planner.measured import STAGES, VIDEO_STAGES, Case, measure_stage

# Messages and graphs in flight are counted; a few latents are not.
TOLERANCE = 0.10

SCHEDULES = ("replay", "retain", "reweight")
TWO, FOUR = ({"ranks": Ranks(pipeline=stages), "steps": 3} for stages in (2, 4))
VIDEO = {"preset": VIDEO_STAGES, "frames": 9, "size": 96}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(**TWO, **VIDEO), id="2 stages of a video model"),
        pytest.param(
            Case(STAGES, recompute="full", **TWO),
            id="2 stages, blocks recomputed",
            marks=pytest.mark.slow,
        ),
        pytest.param(Case(STAGES, **FOUR), id="4 stages", marks=pytest.mark.slow),
        pytest.param(Case(**FOUR, **VIDEO), id="4 stages of a video model", marks=pytest.mark.slow),
    ],
)
def test_every_stage_needs_its_predicted_peak(run_ranks, tmp_path, case):
    prompts = tiny.write_prompts(tmp_path)
    stages = run_ranks(
        case.ranks.pipeline, measure_stage, case, prompts, SCHEDULES, timeout_seconds=300
    )
    for schedule in SCHEDULES:
        peaks = [stage[schedule] for stage in stages]
        for measured, predicted in peaks:
            assert predicted == pytest.approx(measured, rel=TOLERANCE), (schedule, peaks)
        if schedule != "retain":
            # The first stage holds the most graphs; retain's are as many on all.
            assert peaks[0][0] > peaks[-1][0]
