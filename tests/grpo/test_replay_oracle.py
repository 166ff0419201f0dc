# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The gradient that `compare` dumps is that of the published loss on diffusers' own model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.torch import load_file

from megatron_leangrpo import platform
from megatron_leangrpo.config_reader import write_config
from megatron_leangrpo.grpo import commands
from megatron_leangrpo.grpo.advantages import CONVENTIONS
from megatron_leangrpo.grpo.compare import compare_schedules
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.grpo.schedules import SCHEDULES
from tests.grpo import tiny
from tests.grpo.oracle import Oracle

REPOSITORY = Path(__file__).parents[2]
KERNELS = {"flow_sde": 0.7, "dance_sde": 0.3, "wan_sde": None, "cps": 0.8}
# The same model, noise and formulas in another order of operations. Measured: 3e-6 and 2e-13.
TOLERANCE = {"float32": 1e-5, "float64": 1e-11}
DANCE = {"kernel": "dance_sde", "noise_level": 0.3}


def expected_gradient(experiment: Experiment) -> tiny.Tensors:
    """The oracle's gradient of the first update of the first iteration."""
    weights = tiny.weights(experiment)
    return Oracle(experiment, weights).gradient(weights)[0]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Iterator[str]:
    """A prompt file; the world that the first test starts serves all of them."""
    yield tiny.write_prompts(tmp_path_factory.mktemp("prompts"))
    platform.destroy_distributed()


@pytest.mark.parametrize("kernel", KERNELS)
def test_replay_equals_autograd_of_the_published_loss_for_every_convention(prompts, kernel):
    sampling = {"kernel": kernel, "noise_level": KERNELS[kernel]}
    experiment = tiny.start(
        tiny.tiny_config(prompts, sampling=sampling, grpo={"micro_batch_size": 3})
    )
    weights, seen = tiny.weights(experiment), []
    oracle = Oracle(experiment, weights)
    for convention in CONVENTIONS:
        tiny.change_grpo(experiment, advantage=convention)
        oracle.use_convention(convention)
        actual, metrics = tiny.first_gradient(experiment, "replay")
        assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
        error, name = tiny.worst(actual, oracle.gradient(weights)[0])
        assert error < TOLERANCE["float32"], (convention, name)
        # Agreement would say little if two conventions gave one gradient.
        assert all(np.abs(oracle.advantages / other - 1).max() > 1e-3 for other in seen)
        seen.append(oracle.advantages)


VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "first fraction, FLUX's own sigmas": {
        "sampling": {"sigma_schedule": "flux_dynamic", "shift": None, "timestep_fraction": 0.5}
    },
    "shared initial noise": {"sampling": {"shared_initial_noise": True}},
    "a window for each group": {
        "sampling": {"step_selection": "window", "window_size": 2, "window_starts": [0, 1]},
    },
    "a window after the start, cps": {
        "sampling": {
            "kernel": "cps",
            "noise_level": 0.8,
            "step_selection": "window",
            "window_size": 1,
            "window_starts": [2],
            "shared_initial_noise": True,
        },
    },
    "a random fraction for each sample": {
        "sampling": {"step_selection": "random_fraction", "num_steps": 6, "timestep_fraction": 0.6}
    },
    "a sliding window": {
        "sampling": {"step_selection": "progressive", "num_steps": 5, "window_size": 2}
    },
    "DanceGRPO in full": {
        "sampling": {
            **DANCE,
            "step_selection": "random_fraction",
            "num_steps": 6,
            "truncate_timesteps": True,
            "shared_initial_noise": True,
            "output": "predicted_x0",
        },
        "grpo": {"advantage": "dance_group", "micro_batch_size": 1},
    },
    "an advantage clip that bites": {"grpo": {"adv_clip": 0.5}},
    "no advantage clip": {"grpo": {"adv_clip": None, "advantage": "leave_one_out"}},
    "a weighted sum of rewards": {"reward": {"weights": {tiny.SMOOTH: 2.0, tiny.CENTRE: -0.5}}},
    "GRPO-Guard": {"grpo": {"ratio_norm": "grpo_guard"}},
    "GRPO-Guard over windows": {
        "sampling": {"step_selection": "window", "window_size": 1, "window_starts": [0, 1, 2]},
        "grpo": {"ratio_norm": "grpo_guard", "prompts_per_iteration": 4},
    },
    "Flow-Factory's ratio": {"sampling": DANCE, "grpo": {"ratio_norm": "flow_factory"}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_schedule_equals_it_for_every_way_to_sample_and_weigh(prompts, variant):
    config = tiny.tiny_config(prompts, model={"dtype": "float64"}, **VARIANTS[variant])
    experiment = tiny.start(config)
    expected = expected_gradient(experiment)
    for schedule in SCHEDULES:
        if schedule == "reweight":
            tiny.change_grpo(experiment, micro_batch_size=1)
        actual, _ = tiny.first_gradient(experiment, schedule)
        error, name = tiny.worst(actual, expected)
        assert error < TOLERANCE["float64"], (schedule, name)


@pytest.mark.parametrize("kernel", KERNELS)
def test_in_float64_the_kernels_agree_to_the_last_digits(prompts, kernel):
    config = tiny.tiny_config(
        prompts,
        model={"dtype": "float64"},
        sampling={"kernel": kernel, "noise_level": KERNELS[kernel]},
    )
    experiment = tiny.start(config)
    comparison = compare_schedules(experiment, ["replay", "retain"], repeat=1)
    assert comparison.baseline == "replay"
    error, name = tiny.worst(comparison.gradients, expected_gradient(experiment))
    assert error < TOLERANCE["float64"], name
    assert comparison.reports["retain"].worst_rel_error < 1e-12


def _dump_in_layout(folder: str, prompts: str, tensor_parallel: int) -> None:
    """The command itself, but for leaving the world that the other tests go on using."""
    config = tiny.tiny_config(
        prompts,
        parallel={"tensor_model_parallel_size": tensor_parallel},
        grpo={"schedule": "retain"},
    )
    recipe, dump = Path(folder) / "recipe.yaml", Path(folder) / "gradients.safetensors"
    platform.initialize_distributed(tensor_parallel)
    if platform.is_logging_rank():
        recipe.write_text(write_config(config))
    platform.torch.distributed.barrier()
    with mock.patch.object(platform, "destroy_distributed"):
        commands.compare(str(recipe), [], ["retain"], 1, gradients_path=str(dump))


def test_the_file_dumped_by_four_ranks_equals_it(run_ranks, prompts, tmp_path):
    """Tensor and data parallel at once, by the schedule that keeps its graphs."""
    run_ranks(4, _dump_in_layout, str(tmp_path), prompts, 2)
    experiment = tiny.start(tiny.tiny_config(prompts))
    dumped = load_file(tmp_path / "gradients.safetensors")
    error, name = tiny.worst(dumped, expected_gradient(experiment))
    assert error < TOLERANCE["float32"], name


def test_the_file_dumped_on_the_command_line_equals_it(prompts, tmp_path):
    config = tiny.tiny_config(prompts, model={"preset": "flux_tiny"})
    recipe, dump, report = (tmp_path / n for n in ("mine.yaml", "grads.safetensors", "report.json"))
    recipe.write_text(write_config(config))
    command = [sys.executable, "-m", "megatron_leangrpo", "compare", str(recipe), "--repeat=1"]
    command += ["--schedules=replay,retain", f"--json={report}", f"--dump-grads={dump}"]
    command += ["--seed=7"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())["schedules"]
    assert rows["retain"]["rel_error"] <= 1e-6
    experiment = tiny.start(tiny.tiny_config(prompts, model={"preset": "flux_tiny"}, seed=7))
    error, name = tiny.worst(load_file(dump), expected_gradient(experiment))
    assert error < TOLERANCE["float32"], name
