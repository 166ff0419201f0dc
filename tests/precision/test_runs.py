# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Runs in FP8 and bfloat16: one gradient on every schedule, scales over a resume, the report."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.store import checkpoints
from megatron_leangrpo.checkpoint.stored import StoredTensors
from megatron_leangrpo.grpo.experiment import Experiment
from megatron_leangrpo.grpo.fp8 import check_fp8_training, fp8_settings
from megatron_leangrpo.grpo.precision_report import Precision, measure_precision
from megatron_leangrpo.models.common.weights import unwrapped
from megatron_leangrpo.precision.scaling import delayed_scales
from tests.grpo.test_pipelined import FLUX
from tests.grpo.tiny import (
    WAN,
    first_gradient,
    metrics_rows,
    start,
    tiny_config,
    train,
    train_command,
    worst,
    write_prompts,
    write_recipe,
)

RECIPES = ("delayed", "current", "blockwise", "mxfp8")
ONE_BY_ONE = {"micro_batch_size": 1, "group_size": 2, "prompts_per_iteration": 1}


def reference(recipe: str, **settings: Any) -> dict[str, Any]:
    return {"recipe": recipe, "backend": "reference", **settings}


def build(folder: Path, **sections: Any) -> Experiment:
    platform.initialize_distributed(1)
    return start(tiny_config(write_prompts(folder), **{"grpo": ONE_BY_ONE, **sections}))


def gradients_of(experiment: Experiment, *schedules: str) -> list[dict[str, torch.Tensor]]:
    """The first iteration's gradient under each, every ratio of which is 1 to the last bit."""
    found = []
    for schedule in schedules:
        gradient, metrics = first_gradient(experiment, schedule)
        assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
        found.append(gradient)
    return found


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> Callable[[dict], dict[str, torch.Tensor]]:
    """The gradient of a model without FP8, computed once."""
    found: dict[bool, dict[str, torch.Tensor]] = {}

    def gradient(model: dict) -> dict[str, torch.Tensor]:
        if bool(model) not in found:
            folder = tmp_path_factory.mktemp("exact")
            (found[bool(model)],) = gradients_of(build(folder, **model), "replay")
        return found[bool(model)]

    return gradient


# In the others the same linears are called; their scales differ.
@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        ("delayed", {}),
        ("mxfp8", {}),
        ("current", WAN),
        pytest.param("current", {}, marks=pytest.mark.slow),
        pytest.param("blockwise", {}, marks=pytest.mark.slow),
    ],
)
def test_every_schedule_gives_one_gradient(recipe: str, model: dict, exact, tmp_path: Path):
    experiment = build(tmp_path, fp8=reference(recipe), **model)
    replay, retain, reweight = gradients_of(experiment, "replay", "retain", "reweight")
    assert same_bits(replay, retain)
    # As in float32: the advantage is multiplied after the backward instead of before it.
    assert worst(reweight, replay)[0] < 1e-6
    # FP8 is there: without it the gradient differs by about 1e-2.
    assert worst(replay, exact(model))[0] > 1e-3


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_recomputation_gives_the_same_bits(recipe: str, tmp_path: Path):
    kept, recomputed = (
        gradients_of(
            build(tmp_path, fp8=reference(recipe), model={"recompute_granularity": granularity}),
            "retain",
        )[0]
        for granularity in ("none", "full")
    )
    assert same_bits(kept, recomputed)


def test_rounded_gradients_are_for_replay_and_retain(tmp_path: Path):
    experiment = build(tmp_path, fp8=reference("mxfp8", backward="quantized"))
    replay, retain, reweight = gradients_of(experiment, "replay", "retain", "reweight")
    assert same_bits(replay, retain)
    assert worst(reweight, replay)[0] > 1e-3
    reweighted = dataclasses.replace(experiment.config.grpo, schedule="reweight")
    config = dataclasses.replace(experiment.config, grpo=reweighted)
    with pytest.raises(ValueError, match=r"valid: grpo\.schedule = replay or retain"):
        check_fp8_training(config)


def test_scales_follow_the_iterations_and_leave_the_ratio_at_one(tmp_path: Path):
    grpo = {**ONE_BY_ONE, "iterations": 3}
    experiment = build(tmp_path, fp8=reference("delayed"), grpo=grpo)
    blocks = delayed_scales(experiment.policy.model)
    assert list(blocks) == ["double_blocks.0.fp8_scales", "single_blocks.0.fp8_scales"]
    first = {name: scales.scale.clone() for name, scales in blocks.items()}
    assert all((scale != 1).all() for scale in first.values())
    for (update,) in train(experiment, 3):
        assert update["ratio_min"] == update["ratio_max"] == 1.0
    assert not any(torch.equal(scales.scale, first[name]) for name, scales in blocks.items())


def test_scales_survive_a_checkpoint_and_the_run_goes_on_bit_for_bit(tmp_path: Path):
    prompts = write_prompts(tmp_path)
    platform.initialize_distributed(1)

    def recipe(name: str, **checkpoint: Any) -> tuple[str, Path]:
        run = tmp_path / name
        config = tiny_config(
            prompts,
            fp8=reference("delayed", amax_history_len=2),
            grpo={**ONE_BY_ONE, "iterations": 3},
            checkpoint={"interval": 1, "export_interval": -1, **checkpoint},
            output=str(run),
        )
        return write_recipe(config, tmp_path, name), run

    undisturbed, expected = recipe("undisturbed")
    train_command(undisturbed)
    path, run = recipe("killed")
    train_command(path, killed_in=3)
    train_command(path, ["--checkpoint.resume=true"])
    for name in ("reward_mean", "grad_norm"):
        assert metrics_rows(run)[-1][name] == metrics_rows(expected)[-1][name]
    # They are no weights: whoever reads those does not see them.
    newest = checkpoints(run / "checkpoints")[0][1]
    assert not [name for name in StoredTensors(newest).layout if "fp8" in name]
    # The same with fresh scales in place of the stored ones is another run.
    with pytest.raises(ValueError, match=r"fp8\.recipe"):
        train_command(path, ["--checkpoint.resume=true", "--fp8.amax_history_len=5"])


def _train_on_ranks(*arguments: Any, **named: Any) -> None:
    """In a module that has the preset of four blocks."""
    train_command(*arguments, **named)


@pytest.mark.slow
def test_scales_survive_on_two_stages_with_waves_and_updates(run_ranks, tmp_path: Path):
    """The first stage has no block in FP8 and no scales; two waves and two updates an iteration."""
    prompts = write_prompts(tmp_path)

    def recipe(name: str) -> tuple[str, Path]:
        config = tiny_config(
            prompts,
            **FLUX,
            fp8=reference("delayed", amax_history_len=2, first_last_blocks_bf16=1),
            grpo={**ONE_BY_ONE, "prompts_per_iteration": 2, "updates_per_rollout": 2},
            parallel={"pipeline_model_parallel_size": 2, "pipeline_split": [1, 3]},
            checkpoint={"interval": 1, "export_interval": -1},
            output=str(tmp_path / name),
        )
        grpo = dataclasses.replace(config.grpo, iterations=3, schedule="retain")
        config = dataclasses.replace(config, grpo=grpo)
        return write_recipe(config, tmp_path, name), tmp_path / name

    path, expected = recipe("undisturbed")
    run_ranks(2, _train_on_ranks, path)
    path, run = recipe("killed")
    run_ranks(2, _train_on_ranks, path, killed_in=3)
    run_ranks(2, _train_on_ranks, path, ["--checkpoint.resume=true"])
    for name in ("reward_mean", "grad_norm", "ratio_min", "ratio_max"):
        assert metrics_rows(run)[-1][name] == metrics_rows(expected)[-1][name]
    # Second updates see other weights at the same scales.
    assert metrics_rows(run)[-1]["ratio_max"] != 1


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"fp8": {"recipe": "current"}}, "transformer-engine is not installed; valid here"),
        (
            {
                "fp8": {"recipe": "delayed"},
                "parallel": {"tensor_model_parallel_size": 2},
            },
            "transformer-engine is not installed; valid here",
        ),
        ({"fp8": reference("delayed", backward="quantized")}, "valid: dequantized, or fp8.recipe"),
        (
            {
                "fp8": reference("mxfp8", backward="quantized"),
                "parallel": {"tensor_model_parallel_size": 2},
            },
            "parallel.tensor_model_parallel_size = 2: only 1",
        ),
        ({"fp8": reference("current"), "model": {"dtype": "float64"}}, "bfloat16 or float32"),
        ({"fp8": reference("delayed", amax_history_len=0)}, "amax_history_len = 0 must be 1"),
    ],
)
def test_what_cannot_be_is_said_with_what_can(sections: dict, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=re.escape(message)):
        fp8_settings(tiny_config(write_prompts(tmp_path), **sections))


def test_bfloat16_has_wide_log_probs_latents_and_master_weights(tmp_path: Path):
    experiment = build(tmp_path, model={"dtype": "bfloat16"})
    seen = []
    policy = experiment.policy

    class Watched(type(policy)):
        def __call__(self, x, timestep, conditioning):
            velocity = super().__call__(x, timestep, conditioning)
            seen.append((x.dtype, velocity.dtype))
            return velocity

    policy.__class__ = Watched
    measure_precision(experiment)
    assert set(seen) == {(torch.float32, torch.float32)}
    train(experiment, 1)
    weights = dict(unwrapped(experiment.model).named_parameters())
    assert {p.dtype for p in weights.values()} == {torch.bfloat16}
    assert {p.main_grad.dtype for p in weights.values()} == {torch.float32}


def test_the_report_measures_noise_and_warns_below_it(tmp_path: Path):
    noises = {}
    for dtype in ("float32", "bfloat16"):
        precision = measure_precision(build(tmp_path, model={"dtype": dtype}))
        assert precision.line.startswith(f"precision: {dtype}; one rounding of the latents moves")
        assert precision.warning is None or precision.noise > 1e-4
        noises[dtype] = precision.noise
    # A rounding is 2**-24 or 2**-8; the velocity's share in a log-prob is of that order.
    assert noises["float32"] < 1e-6 < 1e-5 < noises["bfloat16"]
    fp8 = measure_precision(build(tmp_path, fp8=reference("current")))
    assert "float32 with FP8 (current, reference)" in fp8.line
    warning = Precision("bfloat16", 3e-5, 1e-5).warning
    assert "grpo.clip_range = 1e-05" in warning and "3.0e-05" in warning


def _replayed_and_retained(prompts: str) -> list[tuple[bool, float]]:
    """Whether replay and retain agree bit for bit on tensor-parallel ranks; reweight's error."""
    found = []
    for recipe, overlap in zip(RECIPES, ("flash", "off", "off", "flash")):
        config = tiny_config(
            prompts,
            fp8=reference(recipe),
            grpo=ONE_BY_ONE,
            parallel={"tensor_model_parallel_size": 2},
            overlap={"mode": overlap},
        )
        gradients = gradients_of(start(config), "replay", "retain", "reweight")
        replay, retain, reweight = gradients
        found.append((same_bits(replay, retain), worst(reweight, replay)[0]))
    return found


@pytest.mark.slow
def test_on_two_ranks_every_schedule_gives_one_gradient(run_ranks, tmp_path: Path):
    for results in run_ranks(2, _replayed_and_retained, write_prompts(tmp_path)):
        for same, error in results:
            assert same and error < 1e-6
