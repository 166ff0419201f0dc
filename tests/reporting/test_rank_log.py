# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A log per rank: what happened when, on every rank, the ones that print nothing too."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.reporting.console import Console
from megatron_leangrpo.reporting.rank_log import RankLog
from tests.grpo import tiny


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_events_are_lines_of_json_and_a_resumed_run_appends(tmp_path):
    with RankLog(tmp_path / "logs", 3) as log:
        log.write("iteration", iteration=7, time_update=0.5, loss=float("nan"), where=Path("x"))
        log.write("warning", 'a "quoted"\nline ±')
    with RankLog(tmp_path / "logs", 3) as log:
        log.write("resumed", iteration=7)
    assert log.path == tmp_path / "logs" / "rank_00003.jsonl"
    first, second, third = rows(log.path)
    assert (first["event"], first["rank"], first["iteration"]) == ("iteration", 3, 7)
    assert (first["time_update"], first["loss"], first["where"]) == (0.5, None, "x")
    assert first["time"] <= second["time"] and first["host"]
    assert (second["message"], second["iteration"]) == ('a "quoted"\nline ±', 7)
    assert third["event"] == "resumed"
    log.write("late")  # after its end: dropped


def test_warnings_of_libraries_are_found_and_still_go_where_they_went(tmp_path, caplog, recwarn):
    before = logging.getLogger().handlers[:]
    with RankLog(tmp_path, 0) as log:
        logging.getLogger("some.library").warning("careful with %s", "that")
        logging.getLogger("some.library").info("nobody needs this")
        warnings.warn("old spelling", FutureWarning, stacklevel=1)
    logging.getLogger("some.library").warning("after the run")
    found = rows(log.path)
    assert [row["message"] for row in found] == ["careful with that", "old spelling"]
    assert found[0]["source"] == "some.library" and "test_rank_log.py" in found[1]["source"]
    assert "careful with that" in caplog.text
    assert [str(w.message) for w in recwarn if w.category is FutureWarning] == ["old spelling"]
    assert logging.getLogger().handlers == before


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "logs").write_text("a file")
    with RankLog(tmp_path / "logs", 0) as log:
        log.write("iteration", iteration=1)


def test_what_a_silent_rank_warns_of_is_kept_until_there_is_a_log(tmp_path, capsys):
    console = Console(enabled=False)
    console.warning("before the run directory")
    console.line("for people")
    with RankLog(tmp_path, 1) as log:
        console.record_to(log.write)
        console.warning("later")
        console.warning("later")
    assert [row["message"] for row in rows(log.path)] == ["before the run directory", "later"]
    assert capsys.readouterr().out == ""


class FailsOnSecondRank(tiny.SmoothReward):
    """Warns, and then fails, on one rank."""

    def __call__(self, images, prompts, metadata) -> torch.Tensor:
        if platform.rank() == 1:
            warnings.warn("the second rank's reward is odd", UserWarning, stacklevel=1)
        return super().__call__(images, prompts, metadata)


def run_of_two(folder: str, prompts: str) -> None:
    config = tiny.tiny_config(
        prompts,
        grpo={"iterations": 2, "micro_batch_size": 2},
        reward={"weights": {"tests.reporting.test_rank_log:FailsOnSecondRank": 1.0}},
        evaluation={"num_steps": 1, "max_prompts": 2},
    )
    recipe = tiny.write_recipe(config, Path(prompts).parent, f"rank{platform.rank()}")
    tiny.train_command(recipe, [f"--output={folder}"])


def test_both_ranks_of_a_run_leave_their_seconds_and_their_warnings(run_ranks, tmp_path):
    run = tmp_path / "run"
    run_ranks(2, run_of_two, str(run), tiny.write_prompts(tmp_path))
    for rank in range(2):
        found = rows(run / "logs" / f"rank_0000{rank}.jsonl")
        (start,) = [row for row in found if row["event"] == "start"]
        assert (start["rank"], start["world_size"], start["dp_rank"]) == (rank, 2, rank)
        iterations = [row for row in found if row["event"] == "iteration"]
        assert [row["iteration"] for row in iterations] == [1, 2]
        for row in iterations:
            parts = sum(row[f"time_{phase}"] for phase in ("rollout", "reward", "update"))
            assert 0 < parts <= row["time_total"]
        odd = [row for row in found if "the second rank's reward is odd" in row.get("message", "")]
        assert bool(odd) == (rank == 1)
        assert found[-1]["event"] == "finished"


def test_an_error_is_in_the_log_with_its_traceback(tmp_path):
    config = tiny.tiny_config(
        tiny.write_prompts(tmp_path),
        grpo={"iterations": 1},
        reward={"weights": {"tests.reporting.test_rank_log:Broken": 1.0}},
    )
    with pytest.raises(RuntimeError, match="no reward today"):
        tiny.train_command(tiny.write_recipe(config, tmp_path), [f"--output={tmp_path}/run"])
    (error,) = [
        row for row in rows(tmp_path / "run/logs/rank_00000.jsonl") if row["event"] == "error"
    ]
    assert "no reward today" in error["message"] and "in __call__" in error["traceback"]
    platform.destroy_distributed()


class Broken(tiny.SmoothReward):
    """Fails in training, where the evaluation has not."""

    calls = 0

    def __call__(self, images, prompts, metadata) -> torch.Tensor:
        Broken.calls += 1
        if Broken.calls > 1:
            raise ArithmeticError("no reward today")
        return super().__call__(images, prompts, metadata)
