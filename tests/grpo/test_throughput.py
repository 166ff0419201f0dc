# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Operations of an iteration by the planner against those that torch counts, and rates of a run."""

from __future__ import annotations

import dataclasses
import json

import pytest
from torch.utils.flop_counter import FlopCounterMode

from megatron_leangrpo import platform
from megatron_leangrpo.grpo.throughput import Throughput, throughput_of
from megatron_leangrpo.planner.gpus import PRESETS, known_peak
from tests.grpo import tiny

CASES = {
    "replay": ({"schedule": "replay"}, {}),
    "retain": ({"schedule": "retain"}, {}),
    "two updates": ({"schedule": "replay", "updates_per_rollout": 2}, {}),
    "guided": ({"schedule": "retain"}, {"cfg_scale": 2.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_operations_are_those_that_torch_counts(tmp_path, case):
    grpo, sampling = CASES[case]
    config = tiny.tiny_config(tiny.write_prompts(tmp_path), grpo=grpo, sampling=sampling)
    experiment = tiny.start(config)
    # Attention in terms that torch's counter knows on a host.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        tiny.train(experiment, 1)
    expected = throughput_of(config, experiment.architecture).flops
    # Embedders of timesteps and text are not in the planner's count; on this model they show.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.1)


def test_rates_follow_from_seconds_and_mfu_needs_a_known_device():
    host = Throughput(samples=8, tokens=800, flops=4e12, peak=None)
    assert host.metrics(2.0) == {
        "samples_per_second": 4,
        "tokens_per_second": 400,
        "tflops_per_rank": 2,
    }
    gpu = dataclasses.replace(host, peak=8e12)
    assert gpu.metrics(2.0)["mfu"] == 0.25


def test_the_peak_of_a_device_is_its_data_sheets_or_unknown():
    assert known_peak("NVIDIA H200", 2) == PRESETS["h200-141gb"].half
    assert known_peak("NVIDIA H100 80GB HBM3", 4) == PRESETS["h100-80gb"].single
    for name in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "Tesla T4"):
        assert known_peak(name, 2) is None
    assert known_peak("NVIDIA H200", 8) is None


def test_ranks_share_the_operations_and_tokens_count_guidance(tmp_path):
    prompts = tiny.write_prompts(tmp_path)
    plain = tiny.tiny_config(prompts)
    architecture = tiny.start(plain).architecture
    one = throughput_of(plain, architecture)
    guided = throughput_of(tiny.tiny_config(prompts, sampling={"cfg_scale": 2.0}), architecture)
    # 8 samples, 4 steps, 16 image and 5 text tokens.
    assert (one.samples, one.tokens, guided.tokens) == (8, 8 * 4 * 21, 2 * 8 * 4 * 21)
    assert guided.flops == pytest.approx(2 * one.flops)


def test_a_run_shows_its_rates_and_sums_them_up(tmp_path):
    config = tiny.tiny_config(tiny.write_prompts(tmp_path), grpo={"iterations": 3})
    recipe = tiny.write_recipe(config, tmp_path)
    tiny.train_command(recipe, [f"--output={tmp_path}/run"])
    platform.destroy_distributed()
    rows = tiny.metrics_rows(tmp_path / "run")
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(4 * 21 * row["samples_per_second"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["throughput"]
    for name in ("samples_per_second", "tokens_per_second", "tflops_per_rank"):
        assert summary[name] == sorted(row[name] for row in rows)[1]
    if platform.is_host():
        assert summary["mfu"] is None
