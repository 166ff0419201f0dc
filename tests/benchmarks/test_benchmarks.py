# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, compare equal computations and write what they promise; not how fast."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_leangrpo.reporting.console import Console
from tests.benchmarks import flux_ranks, schedules
from tests.benchmarks.cases import FAMILIES, Case, Target, targets
from tests.benchmarks.contestants import Contestant
from tests.benchmarks.measure import Figure
from tests.benchmarks.profiling import explain, split

QUICK = ["--quick", "--repeat=1"]
# Float32, another order of operations. Measured: 4e-7.
TOLERANCE = 1e-5


def read_case(folder: Path, name: str) -> dict[str, Any]:
    """The only case of a benchmark's JSON file, whose picture must exist as well."""
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    assert content["settings"]["threads"] == 1
    (case,) = content["cases"]
    for run in case["runs"].values():
        assert len(run["seconds"]) == 1 and run["median"] == run["seconds"][0] > 0
        assert run["peak_activation_bytes"] > 0 and run["gradient_bytes"] > 0
    return case


def check_gradients(runs: dict[str, Any]) -> None:
    """All agree but jagg's, which must differ: its first iteration would be exact."""
    for name, run in runs.items():
        if name == "jagg":
            assert 1e-3 < run["rel_error"] < 1 and run["cosine"] > 0.9
        else:
            assert run["rel_error"] < TOLERANCE, name


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_measures_both_replays_of_both_sides_and_our_schedules(
    single_process, tmp_path, capsys, family
):
    options = [f"--family={family}", "--trained-steps=15", f"--output={tmp_path}"]
    schedules.main([*QUICK, *options])
    case = read_case(tmp_path, f"{family}_schedules")
    runs = case["runs"]
    assert list(runs) == [
        "replay, diffusers",
        "full recomputation, diffusers",
        "replay, ours",
        "full recomputation, ours",
        "retain",
        "reweight",
        "jagg",
    ]
    check_gradients(runs)
    # One step's activations against those of 15 steps and two trajectories.
    assert runs["reweight"]["peak_activation_bytes"] < runs["retain"]["peak_activation_bytes"] / 5
    assert {name for name, run in runs.items() if run["moment_bytes"]} == {"reweight"}
    pairs = [(figure["schedule"], figure["baseline"]) for figure in case["figures"]]
    assert pairs == [
        (schedule, baseline)
        for schedule in ("retain", "reweight", "jagg")
        for baseline in ("replay", "full recomputation")
    ]
    assert "jagg against full recomputation" in capsys.readouterr().out


def run_two_ranks(folder: str) -> None:
    """Called on each rank."""
    flux_ranks.main([*QUICK, "--micro-batch-size=1", f"--output={folder}"])


def test_without_jagg_the_moments_are_seen_too(single_process, tmp_path):
    schedules.main([*QUICK, "--trained-steps=9", f"--output={tmp_path}"])
    runs = read_case(tmp_path, "flux_schedules")["runs"]
    check_gradients(runs)
    assert "jagg" not in runs
    # Sum, weighted sum and a trajectory's own or the total; one of them in the wrapper's buffers.
    assert runs["reweight"]["moment_bytes"] == 2 * runs["reweight"]["gradient_bytes"]


def test_two_ranks_measure_replay_under_fsdp_and_our_schedules(run_ranks, tmp_path):
    run_ranks(2, run_two_ranks, str(tmp_path))
    case = read_case(tmp_path, "flux_ranks")
    assert list(case["runs"]) == ["replay, diffusers, FSDP2", "retain", "jagg"]
    check_gradients(case["runs"])
    assert [f["schedule"] for f in case["figures"]] == ["retain", "jagg"]


def test_the_profile_splits_a_run_into_forward_backward_and_rest(capsys):
    layer = torch.nn.Linear(8, 8)

    def run() -> float:
        start = time.perf_counter()
        layer(torch.ones(4, 8)).sum().backward()
        return time.perf_counter() - start

    names = ("retain", "replay, ours")
    contestants = [Contestant(name, "replay", run, dict, layer, list, "replay") for name in names]
    seconds, spent = split(contestants[0])
    assert min(spent.values()) > 0 and sum(spent.values()) < seconds
    missed = Figure("retain", "replay", "replay, ours", 1.0, (1.0, 1.0), Target(1.26, 1.15))
    assert missed.far_below_ceiling and not missed.reached
    explain(Console(), contestants, [missed])
    printed = capsys.readouterr().out
    for name in names:
        assert f"{name}: operators with the most time of their own" in printed
    assert "aten::addmm" in printed


def test_ceilings_are_those_of_the_published_settings():
    few, many = Case(9, 1, 2), Case(15, 1, 2)
    expected = {
        (few, "retain"): (43 / 34, 52 / 34),
        (many, "reweight"): (61 / 46, 76 / 46),
        (many, "jagg"): (61 / 28, 76 / 28),
    }
    for (case, schedule), ceilings in expected.items():
        found = [target.ceiling for target in targets(case, schedule).values()]
        assert found == pytest.approx(ceilings)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--group-size=3", "such as 4"),
        ("--group-size=1", "such as 2"),
        ("--repeat=0", "0 must be at least 1"),
        ("--micro-batch-size=0", "0 must be at least 1"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(option, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        schedules.main(["--micro-batch-size=2", option])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
