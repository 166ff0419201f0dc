# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""`train --dry-run` says what a run consists of, without weights, ranks or files."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.config_reader import packaged_recipes, read_config, read_recipe
from megatron_leangrpo.grpo import commands
from megatron_leangrpo.grpo.dry_run import rank_bytes
from megatron_leangrpo.grpo.optimization import build_optimization
from megatron_leangrpo.grpo.run_reward import build_run_reward
from tests.grpo import tiny


def dry_run(recipe: str, *overrides: str) -> dict[str, str]:
    """The printed facts by name."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        commands.train(recipe, list(overrides), dry_run=True)
    return facts(output.getvalue())


def facts(text: str) -> dict[str, str]:
    lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    return {name: value.strip() for name, value in (line.split("  ", 1) for line in lines)}


@pytest.fixture
def empty(tmp_path, monkeypatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize("recipe", packaged_recipes())
def test_every_packaged_recipe_can_run(recipe, empty):
    assert dry_run(recipe)
    assert not dist.is_initialized()
    assert list(empty.iterdir()) == []


def test_published_rewards_are_named_where_their_weights_are_missing():
    found = dry_run("flux_dev_mixgrpo")
    assert ", 1 x hpsv2 (HPSv2.1: not on this machine), 1 x image_reward (" in found["rewards"]
    assert found["steps"] == "25, of which 4 are trained (progressive), kernel flow_sde"
    with pytest.raises(ValueError, match=r"reward.paths.pickscore = 'PickScore_v1' is no folder"):
        build_run_reward(read_config(read_recipe("flux_dev_grpo_guard"), []).reward)


def test_flux_dev_on_sixteen_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    found = dry_run("flux_dev_dancegrpo")
    assert "11,901,408,320 parameters" in found["model"]
    assert "FLUX.1-dev (not on this machine" in found["model"]
    assert found["layout"] == "16 ranks: tensor parallel 2, data parallel 8"
    assert found["picture"] == (
        "720 x 720 pixels (h x w), 2025 image tokens (45 x 45) + 512 text tokens"
    )
    assert found["steps"].startswith("16, of which 9 are trained (random_fraction)")
    assert found["iteration"] == (
        "16 prompts x 12 samples = 192 trajectories, 24 a rank in micro-batches of 1, "
        "3 updates of 64"
    )
    # Half of 11.9 G parameters and what is not sharded: bfloat16 weights, float32 gradients, and an
    # eighth of two moments and a copy in float32.
    assert found["bytes a rank"] == (
        "41.7 GiB before activations (weights 11.1 GiB, gradients 22.3 GiB, optimizer 8.3 GiB)"
    )


@pytest.mark.parametrize(
    ("recipe", "ranks", "model", "layout", "video", "steps"),
    [
        ("wan21_1.3b_flowgrpo", 8, "1,418,996,800 parameters, 30 blocks", "data parallel 8",
         "33 frames of 240 x 416 pixels (h x w), 3510 video tokens (9 x 15 x 26)",
         "20, of which 19 are trained (first_fraction), kernel wan_sde"),
        ("wan21_14b_dancegrpo", 64, "14,288,491,584 parameters", "parallel 8, data parallel 8",
         "81 frames of 480 x 832 pixels (h x w), 32760 video tokens (21 x 30 x 52)",
         "20, of which 11 are trained (random_fraction), kernel dance_sde"),
        ("wan22_a14b", 64, "28,576,983,168 parameters, 2 x 40 blocks", "data parallel 8",
         "32760 video tokens", "20, of which 11"),
        ("wan22_5b", 8, "4,999,787,712 parameters", "tensor parallel 2, data parallel 4",
         "9 frames of 704 x 1280 pixels (h x w), 2640 video tokens (3 x 22 x 40)",
         "10, of which 2 are trained (window)"),
    ],
)  # fmt: skip
def test_wan_at_published_settings(monkeypatch, recipe, ranks, model, layout, video, steps):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    found = dry_run(recipe)
    assert model in found["model"] and "(not on this machine" in found["model"]
    assert found["layout"].endswith(layout)
    assert video in found["video"] and steps in found["steps"]
    assert found["guidance"].startswith("scale ")
    assert found["schedule"].startswith("auto: chosen on the machine that has the base")


@pytest.mark.parametrize(
    ("overrides", "gain"),
    [
        # N = 16 sampled and T = 9 trained steps: (N + 3T) / (N + 2T), (N + 4T) / (N + 3T).
        ([], "at most 1.26"),
        (["--model.recompute_granularity=full"], "at most 1.21"),
        (["--grpo.updates_per_rollout=2"], "at most 1.12"),
    ],
)
def test_it_says_what_the_schedule_can_save(overrides, gain):
    assert gain in dry_run("flux_bench", "--grpo.schedule=retain", *overrides)["schedule"]


def _train(recipe: str, overrides: list[str]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        tiny.train_command(recipe, overrides)
    return output.getvalue()


CONSECUTIVE = [
    "--sampling.step_selection=first_fraction",
    "--sampling.timestep_fraction=0.99",
    "--sampling.selection_scope=null",
    "--grpo.jagg_frac=1",
]


@pytest.mark.parametrize(
    ("overrides", "gain"),
    [
        # 61 forwards for replay, 16 + 3 * 15; jagg has 28 = 16 + 4 * 3, on replay 34 = 16 + 6 * 3.
        ([*CONSECUTIVE, "--grpo.jagg_window=5"], "60% of the backwards left out, at most 2.18"),
        (
            [*CONSECUTIVE, "--grpo.jagg_window=5", "--grpo.jagg_on=replay"],
            "60% of the backwards left out, at most 1.79",
        ),
        (
            [*CONSECUTIVE, "--grpo.jagg_window=5", "--model.recompute_granularity=full"],
            "60% of the backwards left out, at most 2.24",
        ),
        # Three of five windows of three.
        ([*CONSECUTIVE, "--grpo.jagg_frac=0.5"], "20% of the backwards left out, at most 1.52"),
    ],
)
def test_it_says_what_jagg_leaves_out(overrides, gain):
    assert gain in dry_run("flux_bench", "--grpo.schedule=jagg", *overrides)["schedule"]


@pytest.mark.parametrize(
    ("recipe", "overrides", "why"),
    [
        ("flux_bench", [], "sampling.block_size = 3"),
        ("flux_tiny", [], "sampling.selection_scope = iteration"),
        ("flux_tiny", ["--grpo.jagg_window=2"], "grpo.jagg_window of 3 or more"),
        ("flux_bench", [*CONSECUTIVE, "--grpo.jagg_frac=0.01"], "rounds to none"),
    ],
)
def test_it_says_why_jagg_would_leave_out_nothing(recipe, overrides, why, capsys):
    commands.train(recipe, ["--grpo.schedule=jagg", *overrides], dry_run=True)
    shown = " ".join(capsys.readouterr().out.split())
    assert "leaves out no backward here: " in shown and why in shown


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("recipe")
    config = tiny.tiny_config(
        tiny.write_prompts(folder),
        parallel={"tensor_model_parallel_size": 2},
        grpo={"iterations": 1, "kl_beta": 0.01},
        optimizer={"ema_decay": 0.9},
    )
    return tiny.write_recipe(config, folder)


def test_a_run_on_two_ranks_checks_the_same(run_ranks, recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    expected = dry_run(recipe)
    assert expected.pop("bytes a rank")
    first, second = run_ranks(2, _train, recipe, [f"--output={tmp_path / 'run'}"])
    assert facts(first) == expected
    assert second == ""

    with pytest.raises(ValueError) as refused:
        dry_run(recipe, "--grpo.updates_per_rollout=3")
    with pytest.raises(AssertionError, match="updates_per_rollout = 3") as error:
        run_ranks(2, _train, recipe, ["--grpo.updates_per_rollout=3"])
    assert str(refused.value) in str(error.value)


def _measure(recipe: str, overrides: list[str]) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes by `rank_bytes`, bytes as they are on this rank, and megatron's padding in numbers."""
    config = read_config(read_recipe(recipe), overrides)
    experiment = tiny.start(config)
    optimization = build_optimization(experiment.model, config.optimizer, 1)
    experiment.runner("replay").run(0, experiment.sampler.batch(0), lambda: {})
    optimization.step()

    [adam] = [part.optimizer for part in optimization.optimizer.chained_optimizers]
    moments = [state[name] for state in adam.state.values() for name in ("exp_avg", "exp_avg_sq")]
    copies = [p for p in optimization.optimizer.get_parameters() if p.dtype == torch.float32]
    weights = list(experiment.policy.model.parameters())
    buffers = [buffer.grad_data for buffer in experiment.model.buffers]
    actual = {
        "weights": _bytes(weights),
        "gradients": _bytes(buffers),
        "optimizer": _bytes(moments + (copies if config.model.dtype == "bfloat16" else [])),
        "reference": _bytes(list(experiment.reference.model.parameters())),
    }
    promised = rank_bytes(config, experiment.architecture, platform.dp_size())
    padding = sum(b.numel() for b in buffers) - sum(p.numel() for p in weights)
    return dataclasses.asdict(promised), actual, padding


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_the_bytes_it_promises_are_those_of_a_rank(run_ranks, recipe, dtype, tensor_parallel):
    overrides = [
        f"--model.dtype={dtype}",
        f"--parallel.tensor_model_parallel_size={tensor_parallel}",
    ]
    for promised, actual, padding in run_ranks(2, _measure, recipe, overrides):
        assert actual["weights"] == promised["weights"]
        assert actual["reference"] == promised["reference"]
        # megatron pads its buffers, and deals them over the data-parallel ranks in equal parts.
        assert 0 <= padding < 1024
        assert actual["gradients"] - promised["gradients"] == 4 * padding
        assert abs(actual["optimizer"] - promised["optimizer"]) <= 12 * padding
