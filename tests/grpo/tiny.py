# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What the tests of whole iterations share: the smallest models, smooth rewards, their runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.config_reader import write_config
from megatron_leangrpo.grpo import commands, data_parallel, run_report
from megatron_leangrpo.grpo import experiment as experiment_module
from megatron_leangrpo.grpo.experiment import Experiment, build_experiment
from megatron_leangrpo.grpo.iteration import IterationRunner
from megatron_leangrpo.grpo.optimization import build_optimization
from megatron_leangrpo.models.common.weights import full_tensors
from megatron_leangrpo.models.flux.config import PRESETS, FluxConfig, flux_tiny
from megatron_leangrpo.models.wan.config import PRESETS as WAN_PRESETS
from megatron_leangrpo.models.wan.config import WanConfig, wan_tiny

Tensors = dict[str, torch.Tensor]

PRESET = "flux_smallest"
SMOOTH = "tests.grpo.tiny:SmoothReward"
CENTRE = "tests.grpo.tiny:CentreReward"


def flux_smallest(**overrides: Any) -> FluxConfig:
    """One block of each kind, four heads of eight: milliseconds a forward."""
    small = {"num_single_blocks": 1, "hidden_size": 32, "axes_dims_rope": (2, 2, 4)}
    return flux_tiny(
        **{**small, "joint_attention_dim": 16, "pooled_projection_dim": 16, **overrides}
    )


def wan_smallest(**overrides: Any) -> WanConfig:
    """One block, four heads of eight, and 8 tokens for a video of 5 x 32 x 32."""
    small = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 48, "joint_attention_dim": 16}
    return wan_tiny(**{**small, "in_channels": 4, "out_channels": 4, **overrides})


def wan_smallest_experts(**overrides: Any) -> WanConfig:
    """Two of them; with shift 3 the first two of four steps are the first one's."""
    return wan_smallest(**{"experts": 2, "expert_boundary": 0.8, **overrides})


PRESETS[PRESET] = flux_smallest
WAN_PRESETS["wan_smallest"] = wan_smallest
WAN_PRESETS["wan_smallest_experts"] = wan_smallest_experts
WAN: dict[str, dict[str, Any]] = {
    "model": {"family": "wan", "preset": "wan_smallest"},
    "sampling": {"height": 32, "width": 32, "num_frames": 5},
}
"""Sections of a run of videos."""


class SmoothReward:
    """A smooth functional of the picture: an ulp in the latents is an ulp in the reward.

    A JPEG's size would not do where layouts are compared: it jumps when one pixel rounds up.
    """

    def __call__(
        self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        flat = images.double().flatten(1)
        waves = torch.cos(torch.arange(flat.shape[1], dtype=torch.float64) * math.sqrt(2))
        return (flat * waves).mean(dim=1) + (flat - 0.5).square().mean(dim=1)


class CentreReward:
    """How bright the upper left of a picture is, on another scale than `SmoothReward`."""

    def __call__(
        self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        return 20 + images[..., :24, :24].double().flatten(1).mean(dim=1)


_SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"preset": PRESET, "max_text_tokens": 5},
    "sampling": {
        "height": 64,
        "width": 64,
        "num_steps": 4,
        "sigma_schedule": "static_shift",
        "shift": 3.0,
        "noise_level": 0.7,
    },
    "grpo": {"iterations": 4, "prompts_per_iteration": 2, "group_size": 4, "micro_batch_size": 4},
    "reward": {"weights": {SMOOTH: 1.0}},
    "optimizer": {"lr": 1e-3},
    "evaluation": {
        "interval": 0,
        "num_steps": 2,
        "samples_per_prompt": 1,
        "max_prompts": 2,
        "grid_images": 2,
    },
    "checkpoint": {"interval": -1},
}


def merged(*layers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sections of several layers; a later layer's fields win."""
    sections: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for name, fields in layer.items():
            sections[name] = {**sections.get(name, {}), **fields}
    return sections


def write_prompts(folder: Path, count: int = 3) -> str:
    """Write a prompt file and return its path."""
    path = folder / "prompts.txt"
    path.write_text("".join(f"the number {n}\n" for n in range(count)), encoding="utf-8")
    return str(path)


def tiny_config(prompts: str, **sections: Any) -> RunConfig:
    """A run of 16 image tokens; `sections` override fields, e.g. `grpo={"group_size": 2}`.

    A section's value may also be a plain field of the run (`seed=3`).
    """
    config = RunConfig(
        recipe="tiny", prompts=dataclasses.replace(RunConfig().prompts, train=prompts)
    )
    for layer in (_SECTIONS, sections):
        changes = {
            name: dataclasses.replace(getattr(config, name), **value)
            if isinstance(value, dict)
            else value
            for name, value in layer.items()
        }
        config = dataclasses.replace(config, **changes)
    return config


def start(config: RunConfig) -> Experiment:
    """Join the layout of the configuration, unless we are in it, and build its experiment."""
    parallel = config.parallel
    layout = {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
    }
    current = (platform.tp_size(), platform.group_size(platform.cp_group()), platform.pp_size())
    if platform.dp_group() is None or current != tuple(layout.values()):
        platform.initialize_distributed(**layout)
    return build_experiment(config)


def change_grpo(experiment: Experiment, **changes: Any) -> None:
    """Change settings that the next runner of an experiment reads."""
    grpo = dataclasses.replace(experiment.config.grpo, **changes)
    experiment.config = dataclasses.replace(experiment.config, grpo=grpo)


def move_away_from_reference(experiment: Experiment) -> None:
    """Where the weights are the reference's, the KL term has no gradient."""
    with torch.no_grad():
        for parameter in experiment.reference.model.parameters():
            parameter.mul_(1.1)


def buckets_of(numbers: int) -> AbstractContextManager[Any]:
    """Experiments built inside collect gradients in small buckets."""
    wrap = functools.partial(data_parallel.wrap_data_parallel, bucket_size=numbers)
    return mock.patch.object(experiment_module, "wrap_data_parallel", wrap)


def first_gradient(experiment: Experiment, schedule: str) -> tuple[Tensors, dict[str, float]]:
    """The full gradient of the first iteration, under diffusers' names, and its metrics."""
    result = experiment.runner(schedule).run(0, experiment.sampler.batch(0))
    return experiment.architecture.export_gradients(experiment.model), result.metrics


def weights(experiment: Experiment) -> Tensors:
    """Full weights under diffusers' names."""
    return full_tensors(experiment.policy.model, experiment.architecture.weight_rules)


def train(
    experiment: Experiment,
    iterations: int,
    before_update: Callable[[], None] = lambda: None,
) -> list[list[dict[str, float]]]:
    """Run iterations with the configured schedule; returns each one's metrics by update."""
    config = experiment.config
    total = config.grpo.iterations * config.grpo.updates_per_rollout
    optimization = build_optimization(experiment.model, config.optimizer, total)
    runner = experiment.runner(config.grpo.schedule)

    def apply_update() -> dict[str, float]:
        before_update()
        return optimization.step()

    return [
        runner.run(i, experiment.sampler.batch(i), apply_update).updates for i in range(iterations)
    ]


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expected tensor; 0 if both are zero."""
    difference = (actual.double() - expected.double()).norm().item()
    size = expected.double().norm().item()
    return difference / size if size else math.inf if difference else 0.0


def worst(actual: Tensors, expected: Tensors) -> tuple[float, str]:
    """The largest relative L2 over tensors of the same names, and where it is."""
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    return max((relative_l2(actual[name], expected[name]), name) for name in expected)


class Killed(BaseException):
    """Ends a run in the middle, as a signal would."""


def write_recipe(config: RunConfig, folder: Path, name: str = "recipe") -> str:
    """Write a configuration as a recipe file and return its path."""
    path = folder / f"{name}.yaml"
    path.write_text(write_config(config), encoding="utf-8")
    return str(path)


def finished_run(recipe: str, folder: Path) -> Path:
    """`leangrpo train` into a new folder, which is returned; the world is gone afterwards."""
    train_command(recipe, [f"--output={folder}"])
    platform.destroy_distributed()
    return folder


def train_command(
    recipe: str, overrides: Sequence[str] = (), killed_in: int | None = None
) -> list[list[tuple[int, str]]]:
    """`leangrpo train`, but for its curves; the world stays for other tests.

    The run can be killed in the middle of iteration number `killed_in` (from 1). Returns the id and
    text of each group of every finished iteration.
    """
    run, prompts_used = IterationRunner.run, []

    def run_or_die(self: IterationRunner, iteration: int, prompts: Any, *arguments: Any) -> Any:
        if iteration + 1 == killed_in:
            raise Killed
        result = run(self, iteration, prompts, *arguments)
        prompts_used.append([(prompt.id, prompt.text) for prompt in prompts])
        return result

    with (
        mock.patch.object(platform, "destroy_distributed"),
        mock.patch.object(IterationRunner, "run", run_or_die),
        mock.patch.object(run_report, "save_curves"),
    ):
        with contextlib.suppress(Killed):
            commands.train(recipe, list(overrides))
        # The lock on the run directory goes with the run's objects, and those with the traceback.
        gc.collect()
    return prompts_used


def metrics_rows(run: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    text = (Path(run) / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
