# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What linears in FP8 keep of their inputs, counted from the graph and predicted."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest

from megatron_leangrpo.planner.workload import Ranks
from tests.grpo import tiny
from tests.planner import measured
from tests.planner.measured import Case
from tests.planner.test_memory import _saved_on_a_rank

TENSOR = Ranks(tensor=2)
CASES = [
    pytest.param(Case(), {"recipe": "current"}, id="current"),
    pytest.param(Case(), {"recipe": "mxfp8", "first_last_blocks_bf16": 1}, id="mxfp8, one inside"),
    pytest.param(Case(dtype="bfloat16"), {"recipe": "blockwise"}, id="blockwise, bfloat16"),
    pytest.param(Case(ranks=TENSOR, size=144, text=7), {"recipe": "current"}, id="tp 2"),
    pytest.param(
        Case(measured.VIDEO, frames=9, size=80, ranks=TENSOR), {"recipe": "mxfp8"}, id="video, tp 2"
    ),
]


def _saved(prompts: str, case: Case, fp8: dict[str, Any]) -> tuple[int, int, int]:
    config_of = measured._config

    def with_fp8(*arguments: Any) -> Any:
        config = config_of(*arguments)
        return dataclasses.replace(config, fp8=dataclasses.replace(config.fp8, **fp8))

    with mock.patch.object(measured, "_config", with_fp8):
        return _saved_on_a_rank(prompts, case)


@pytest.mark.parametrize(("case", "fp8"), CASES)
def test_what_is_kept_is_what_was_predicted(run_ranks, tmp_path, case: Case, fp8: dict):
    prompts, reference = tiny.write_prompts(tmp_path), {"backend": "reference", **fp8}
    ranks = run_ranks(case.ranks.tensor, _saved, prompts, case, reference)
    for counted, predicted, plain in ranks:
        # The small vectors of the conditioning are reckoned together.
        assert predicted == pytest.approx(counted, rel=0.03)
        assert counted < 0.97 * plain
