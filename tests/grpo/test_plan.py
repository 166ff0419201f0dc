# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""`leangrpo plan`, and `grpo.schedule = auto` in the commands that run something."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_leangrpo.config_reader import read_config, read_recipe
from megatron_leangrpo.grpo import planning
from megatron_leangrpo.grpo.commands import plan
from megatron_leangrpo.planner import gpus
from megatron_leangrpo.planner.workload import Ranks
from tests.grpo import tiny

WAN = str(Path(__file__).parents[1] / "planner" / "wan_14b.yaml")
FLUX = [
    "--grpo.advantage=flow_grpo_group_std",
    "--grpo.micro_batch_size=1",
    "--grpo.updates_per_rollout=1",
    # All weights.
    "--lora.rank=0",
]


def planned(recipe: str, *overrides: str, gpu: str = "h100-80gb", count: int = 32) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        plan(recipe, list(overrides), gpu, count)
    return output.getvalue()


def test_flux_at_512_keeps_its_graphs_on_h100_nodes(tmp_path):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        files = str(tmp_path / "plan.json"), str(tmp_path / "timeline.png")
        plan("flux_dev_flowgrpo", FLUX, "h100-80gb", 32, *files)
    report = json.loads((tmp_path / "plan.json").read_text())
    chosen = report["chosen"]
    layout = f"{chosen['schedule']} on TP {chosen['tensor_model_parallel_size']}"
    assert f"\nchosen: {layout}" in output.getvalue()
    rows = report["candidates"]
    whole = [row for row in rows if row["fits"] and row["exact"] and not row["stages"]]
    assert whole[0]["schedule"] == "retain"
    # A quarter of the weights and the graph of one step: tensor parallelism is not needed.
    assert chosen["pipeline_model_parallel_size"] == 4
    assert chosen["seconds"]["total"] <= whole[0]["seconds"]["total"]
    assert {row["schedule"] for row in rows} == {"replay", "retain", "reweight", "jagg"}
    # Every schedule on each TP x CP that fits into a node, with and without recomputation, and on
    # as many pipeline stages as the ranks allow.
    assert {row["pipeline_model_parallel_size"] for row in rows} == {1, 2, 4, 8}
    assert len([row for row in rows if not row["stages"]]) == 4 * 2 * 10
    assert all(row["reason"] for row in rows)
    assert all(row["memory_bytes"]["total"] > 0 and row["seconds"]["total"] > 0 for row in rows)
    assert [row for row in rows if row["chosen"]] == [chosen]
    staged = [row for row in rows if row["pipeline_model_parallel_size"] == 4]
    assert all(len(row["stages"]) == 4 == row["waves_in_flight"] for row in staged)
    assert all(0 < row["seconds"]["idle"] < 1 for row in staged)
    assert "--timeline: " in output.getvalue()
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    # What a reader sees is a part of it.
    assert output.getvalue().count("TP ") < len(rows)


def test_encoders_are_not_counted_where_embeddings_are_cached(tmp_path):
    with_encoders = planned("flux_dev_flowgrpo", *FLUX)
    without = planned("flux_dev_flowgrpo", *FLUX, f"--prompts.embedding_cache={tmp_path}")
    assert "text encoders 9.1 GiB" in with_encoders
    assert "text encoders" not in without
    assert "codec 0.2 GiB" in without


def test_flux_with_adapters_weighs_their_small_gradients_afterwards():
    text = planned("flux_dev_flowgrpo", *FLUX[:-1])
    # Flow-GRPO's adapters: 179 306 496 numbers, of which a copy is 0.7 GiB.
    assert "chosen: reweight on TP 1 x DP 32" in text and "gradients 0.7 GiB" in text
    assert "replay 16, retain 11, reweight 11" in text


def test_wan_14b_weighs_gradients_afterwards_at_tensor_parallel_8():
    text = planned(WAN, count=64)
    assert "14.29 B parameters, 480 x 832 x 81 frames = 32760 tokens, guided" in text
    assert "chosen: reweight" in text
    assert "on TP 8 x DP 8, as configured: reweight" in text


@pytest.mark.parametrize(
    ("recipe", "count", "layout", "chosen"),
    [
        # With a KL term a backward of its own makes reweight no faster than replay.
        ("wan21_1.3b_flowgrpo", 8, "TP 1 x DP 8", "replay"),
        ("wan21_14b_dancegrpo", 64, "TP 8 x DP 8", "reweight"),
        ("wan22_a14b", 64, "TP 8 x DP 8", "reweight"),
        # 2640 tokens: small enough for the graphs of both trained steps.
        ("wan22_5b", 8, "TP 2 x DP 4", "retain"),
    ],
)
def test_long_videos_weigh_gradients_afterwards_and_short_ones_keep_graphs(
    recipe, count, layout, chosen
):
    text = planned(recipe, count=count)
    configured = f"on {layout}, as configured: {chosen}"
    assert configured in text or (f"chosen: {chosen}" in text and f"on {layout}, the" in text)
    assert "the fastest exact schedule that fits" in text


STAGED = ["--parallel.tensor_model_parallel_size=2", "--parallel.pipeline_model_parallel_size=4"]


def test_a_configured_pipeline_is_planned_as_it_will_run():
    text = planned(WAN, *STAGED, "--parallel.pipeline_waves_in_flight=2", count=64)
    assert "on TP 2 x PP 4 x DP 8, as configured: " in text or "on TP 2 x PP 4 x DP 8, the" in text
    assert "stages: 4 of 10 + 10 + 10 + 10 blocks, 2 waves in flight, waiting " in text
    assert "warning: 2 trajectories are in flight on 4 pipeline stages, which wait for " in text
    assert "warning" not in planned(WAN, *STAGED, count=64)
    uneven = planned(WAN, *STAGED, "--parallel.pipeline_split=[7, 11, 11, 11]", count=64)
    assert "stages: 4 of 7 + 11 + 11 + 11 blocks, 4 waves in flight" in uneven
    even = "parallel.pipeline_split = [10, 10, 10, 10] is more even on h100-80gb"
    assert f"slower than the mean of the stages, which wait for it: {even}" in uneven


@pytest.mark.parametrize(
    ("preset", "size"),
    [("wan21_1.3b", "1.42 B"), ("wan22_a14b", "28.58 B"), ("wan22_5b", "5.00 B")],
)
def test_it_knows_the_other_wan_models(preset, size):
    text = planned(WAN, f"--model.preset={preset}", "--grpo.group_size=64", count=1024)
    assert f"{size} parameters" in text
    assert "chosen: " in text
    # 480 x 832 is 30 x 52 tokens of 16 pixels, or 15 x 26 of the 5B's 32.
    assert f"= {8190 if preset == 'wan22_5b' else 32760} tokens" in text


@pytest.mark.parametrize("gpu", [*gpus.PRESETS, gpus.HOST])
def test_every_device_can_be_planned_for(gpu):
    assert f"on 2 x {gpu}" in planned("flux_bench", gpu=gpu, count=2)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--gpu=h200"], ["--gpu = 'h200'", "valid: h100-80gb, h200-141gb", "host"]),
        (["--gpus=0"], ["--gpus = 0", "valid: 1 to 1024"]),
        (["--gpus=1025"], ["--gpus = 1025", "valid: 1 to 1024"]),
        (["--gpus=7"], ["--gpus = 7", "nearest valid: 4 or 8"]),
        (["--gpus=1"], ["no schedule fits into 73.3 GiB", "the least is", "Take a device"]),
        (["--gpus=8", "--sampling.num_frames=80"], ["num_frames = 80", "77 or 81"]),
        (["--json=no/such.json"], ["--json", "its directory does not exist"]),
        (["--model.preset=wan_7b"], ["wan_7b", "wan21_14b"]),
        (
            [*STAGED, "--parallel.pipeline_split=[10, 10, 10, 9]"],
            ["pipeline_split is [10, 10, 10, 9]", "adds up to 39", "[10, 10, 10, 10]"],
        ),
        (["--parallel.pipeline_model_parallel_size=41"], ["is 41", "valid values: 1 to 40"]),
        (["--grpo.jagg_window=0"], ["grpo.jagg_window = 0", "1 or more"]),
        (["--grpo.jagg_frac=1.5"], ["grpo.jagg_frac = 1.5", "between 0 and 1"]),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(leangrpo, arguments, parts):
    leangrpo.refuses(parts, "plan", WAN, *arguments)


def test_planning_loads_no_model_code():
    program = (
        "import sys, megatron_leangrpo.grpo.plan, megatron_leangrpo.models.flux.family;"
        "print([n for n in ('megatron.core', 'diffusers', 'transformers') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "[]\n", result


@pytest.fixture
def recipe(tmp_path) -> str:
    config = tiny.tiny_config(
        tiny.write_prompts(tmp_path),
        grpo={"schedule": "auto", "iterations": 1, "micro_batch_size": 1},
    )
    return tiny.write_recipe(config, tmp_path)


def test_auto_becomes_a_schedule_in_everything_a_run_writes(leangrpo, recipe):
    outcome = leangrpo("train", recipe, "--output=run")
    assert outcome.status == 0, outcome.err
    assert "chosen by auto with recomputation none: the fastest exact schedule" in outcome.out
    assert [row["schedule"] for row in tiny.metrics_rows("run")] == ["retain"]
    assert read_config(read_recipe("run/config.yaml"), []).grpo.schedule == "retain"


def test_auto_follows_the_memory_of_the_device(recipe, monkeypatch):
    config = read_config(read_recipe(recipe), [])
    device = gpus.host()
    everything = planning.all_candidates(
        config,
        planning.workload_of(config, planning.resolve_architecture(config)),
        [Ranks()],
        device,
    )
    need = {(c.schedule, c.recompute): c.memory.total for c in everything}

    def with_memory(size: int) -> tuple[str, str]:
        small = dataclasses.replace(device, memory=size, reserve=0.0)
        monkeypatch.setattr(planning, "_device", lambda ranks: small)
        resolved, reason = planning.resolve_auto(config, 1)
        assert reason
        return resolved.grpo.schedule, resolved.model.recompute_granularity

    assert with_memory(need["retain", "none"]) == ("retain", "none")
    assert with_memory(need["retain", "none"] - 1) != ("retain", "none")
    assert with_memory(need["replay", "full"]) == ("replay", "full")
    with pytest.raises(ValueError, match="no schedule fits"):
        with_memory(min(need.values()) - 1)


def test_a_schedule_that_was_asked_for_stays(recipe):
    config = read_config(read_recipe(recipe), ["--grpo.schedule=replay"])
    assert planning.resolve_auto(config, 1) == (config, None)
