# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A killed run continues bit for bit in its layout, closely in another one, and loses nothing."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from safetensors.torch import load_file

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.store import newest_valid
from megatron_leangrpo.checkpoint.training import load_weights
from megatron_leangrpo.grpo import commands
from tests.grpo import tiny

# Two updates of AdamW after the change of layout, in float32.
BETWEEN_LAYOUTS = 1e-5
RESUME = "--checkpoint.resume=true"
# What may differ between two runs that are the same.
MEASURED = (
    "time_",
    "samples_per_second",
    "tokens_per_second",
    "tflops_per_rank",
    "peak_memory_bytes",
    "update_2/time_",
)


LAYOUTS = {
    "alone": (1, []),
    "alone, bfloat16, plain optimizer": (
        1,
        ["--model.dtype=bfloat16", "--optimizer.use_distributed_optimizer=false"],
    ),
    "dp 2": (2, []),
    "tp 2": (2, ["--parallel.tensor_model_parallel_size=2"]),
    "tp 4": (4, ["--parallel.tensor_model_parallel_size=4"]),
    "cp 2": (2, ["--parallel.context_parallel_size=2"]),
    "pp 2": (2, ["--parallel.pipeline_model_parallel_size=2"]),
    "adapters": (1, ["--lora.rank=2"]),
    "adapters, pp 2": (2, ["--lora.rank=2", "--parallel.pipeline_model_parallel_size=2"]),
    "adapters, tp 2": (2, ["--lora.rank=2", "--parallel.tensor_model_parallel_size=2"]),
}
BIT_FOR_BIT = [layout for layout in LAYOUTS if layout not in ("tp 4", "cp 2", "adapters")]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> str:
    """Four iterations with everything that has a state: two updates each, average, decay."""
    folder = tmp_path_factory.mktemp("recipe")
    config = tiny.tiny_config(
        tiny.write_prompts(folder, count=5),
        sampling={"num_steps": 4},
        grpo={"iterations": 4, "updates_per_rollout": 2, "schedule": "jagg", "jagg_frac": 1.0},
        optimizer={
            "lr_warmup_updates": 2,
            "lr_decay_style": "cosine",
            "ema_decay": 0.9,
            "ema_interval": 3,
        },
        evaluation={"interval": 2},
        checkpoint={"interval": 2},
    )
    return tiny.write_recipe(config, folder)


@pytest.fixture(scope="module")
def train(run_ranks, recipe) -> Callable[..., Path]:
    """`leangrpo train` in a layout, into a folder; ranks are started once for all tests."""

    def run(layout: str, folder: Path, *overrides: str, killed_in: int | None = None) -> Path:
        world, own = LAYOUTS[layout]
        options = [f"--output={folder}", *own, *overrides]
        if world == 1:
            tiny.train_command(recipe, options, killed_in)
            platform.destroy_distributed()
        else:
            run_ranks(world, tiny.train_command, recipe, options, killed_in)
        return folder

    return run


@pytest.fixture(scope="module")
def straight(train, tmp_path_factory) -> Callable[[str], Path]:
    """An undisturbed run in a layout; do not change it."""
    return functools.cache(lambda layout: train(layout, tmp_path_factory.mktemp("run") / "run"))


@pytest.fixture(scope="module")
def killed(train, tmp_path_factory) -> Callable[[str, Path], Path]:
    """A copy of a run in a layout that was killed in iteration 4, two after its checkpoint."""

    @functools.cache
    def run(layout: str) -> Path:
        folder = train(layout, tmp_path_factory.mktemp("killed") / "run", killed_in=4)
        assert [row["iteration"] for row in tiny.metrics_rows(folder)] == [1, 2, 3]
        return folder

    return lambda layout, copy: Path(shutil.copytree(run(layout), copy))


def tensors_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint: weights, average, moments."""
    from megatron.core import dist_checkpointing

    folder = run / "checkpoints" / f"step_{step:06d}"
    flat: dict[str, torch.Tensor] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(f"{prefix}.{key}", inner)
        elif isinstance(value, torch.Tensor):
            flat[prefix] = value

    collect("", dist_checkpointing.load_plain_tensors(str(folder)))
    collect("common", dist_checkpointing.load_common_state_dict(str(folder)))
    return flat


def comparable_rows(run: Path) -> list[dict[str, Any]]:
    rows = tiny.metrics_rows(run)
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows]


def assert_bitwise_equal(run: Path, straight: Path) -> None:
    """Checkpoints, metrics and pictures of two runs."""
    assert comparable_rows(run) == comparable_rows(straight)
    assert [row["iteration"] for row in comparable_rows(run)] == [1, 2, 3, 4]
    platform.initialize_distributed()
    for step in (2, 4):
        own, expected = tensors_of(run, step), tensors_of(straight, step)
        assert own.keys() == expected.keys()
        assert any("exp_avg" in name for name in own), "the optimizer is part of it"
        assert any("average" in name for name in own)
        for name in expected:
            assert torch.equal(own[name], expected[name]), (step, name)
    platform.destroy_distributed()
    for name in ("before", "after", "before_after", "step_000000", "step_000002", "step_000004"):
        picture = f"samples/{name}.png"
        assert (run / picture).read_bytes() == (straight / picture).read_bytes(), name


@pytest.mark.parametrize("layout", BIT_FOR_BIT)
def test_a_killed_run_resumes_bit_for_bit(train, straight, killed, tmp_path, layout):
    """Its iteration 3 is in the metrics but not in a checkpoint."""
    run = train(layout, killed(layout, tmp_path / "run"), RESUME)
    assert_bitwise_equal(run, straight(layout))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp 2", "alone"),
        ("tp 2", "dp 2"),
        ("tp 2", "tp 4"),
        ("alone", "cp 2"),
        ("cp 2", "tp 2"),
        ("pp 2", "alone"),
        ("tp 2", "pp 2"),
        ("adapters, tp 2", "adapters, pp 2"),
        ("dp 2", "alone"),
        ("adapters, tp 2", "adapters"),
    ],
)
def test_a_run_resumes_in_another_layout(train, straight, killed, tmp_path, before, after):
    alone = "adapters" if before.startswith("adapters") else "alone"
    run, expected = train(after, killed(before, tmp_path / "run"), RESUME), straight(alone)
    platform.initialize_distributed()
    assert tiny.worst(final_weights(run), final_weights(expected))[0] < BETWEEN_LAYOUTS
    platform.destroy_distributed()


def test_adapters_of_all_stages_are_exported(straight):
    own, expected = (
        load_file(straight(layout) / "export/step_000004/pytorch_lora_weights.safetensors")
        for layout in ("adapters, pp 2", "adapters")
    )
    assert tiny.worst(own, expected)[0] < BETWEEN_LAYOUTS


def test_adapters_continue_on_the_base_they_were_trained_on_only(train, killed, tmp_path):
    run = killed("adapters", tmp_path / "run")
    for layout, override, message in (
        ("adapters", "--seed=1", "trained on other weights"),
        ("alone", "--seed=0", "trained adapters"),
    ):
        with pytest.raises(ValueError, match=message):
            train(layout, run, RESUME, override)
        platform.destroy_distributed()


def final_weights(run: Path) -> tiny.Tensors:
    """The weights and their average after iteration 4, under the checkpoint's names."""
    tensors = tensors_of(run, 4)
    return {n: t for n, t in tensors.items() if t.is_floating_point() and "optimizer" not in n}


def test_folders_that_no_save_has_finished_are_ignored(train, tmp_path):
    """A save that dies in the middle, and folders that only look like checkpoints."""
    from megatron.core import dist_checkpointing

    run, save = tmp_path / "run", dist_checkpointing.save

    def save_and_die(state: Any, folder: str, *arguments: Any, **options: Any) -> None:
        save(state, folder, *arguments, **options)
        if "step_000004" in folder:
            raise tiny.Killed

    with mock.patch.object(dist_checkpointing, "save", save_and_die):
        train("alone", run)
    checkpoints = run / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == [".step_000004.tmp", "step_000002"]
    (checkpoints / "step_000009").mkdir()
    (checkpoints / "step_notes").mkdir()
    assert newest_valid(checkpoints).checkpoint == checkpoints / "step_000002"

    train("alone", run, RESUME)
    assert newest_valid(checkpoints).checkpoint == checkpoints / "step_000004"
    assert not (checkpoints / ".step_000004.tmp").exists()
    assert [row["iteration"] for row in tiny.metrics_rows(run)] == [1, 2, 3, 4]


def contents(run: Path) -> dict[str, bytes]:
    """All files of a run but its logs, where every start is noted."""
    return {
        str(p.relative_to(run)): p.read_bytes()
        for p in sorted(run.rglob("*"))
        if p.is_file() and p.name != ".lock" and p.parent != run / "logs"
    }


def test_resuming_a_finished_run_says_so_and_changes_nothing(train, straight, tmp_path, capsys):
    run = Path(shutil.copytree(straight("alone"), tmp_path / "run"))
    before = contents(run)
    capsys.readouterr()
    train("alone", run, RESUME)
    assert (
        "this run has finished its 4 iterations; raise grpo.iterations" in capsys.readouterr().out
    )
    assert contents(run).keys() == before.keys()
    assert contents(run) == before

    train("alone", run, RESUME, "--grpo.iterations=5")
    assert [row["iteration"] for row in tiny.metrics_rows(run)] == [1, 2, 3, 4, 5]


def test_auto_starts_a_run_and_then_continues_it(train, straight, tmp_path):
    """The same command twice, as a scheduler that requeues gives it."""
    auto = "--checkpoint.resume=auto"
    train("alone", tmp_path / "run", auto, killed_in=4)
    run = train("alone", tmp_path / "run", auto)
    assert_bitwise_equal(run, straight("alone"))


def test_auto_starts_again_where_a_run_was_ended_before_its_first_checkpoint(
    train, straight, tmp_path
):
    auto = "--checkpoint.resume=auto"
    train("alone", tmp_path / "run", auto, killed_in=2)
    run = train("alone", tmp_path / "run", auto)
    assert_bitwise_equal(run, straight("alone"))


@pytest.mark.parametrize("layout", ["alone", "dp 2"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_continues(
    train, straight, tmp_path, layout, capfd
):
    run = Path(shutil.copytree(straight(layout), tmp_path / "run"))
    damaged = max((run / "checkpoints" / "step_000004").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    capfd.readouterr()
    train(layout, run, RESUME)
    if layout == "alone":
        shown = " ".join(capfd.readouterr().out.split())
        reason = f"the content of {damaged.name} is not what was written"
        assert f"passed over checkpoint step_000004: {reason}" in shown
    assert_bitwise_equal(run, straight(layout))


def test_a_run_of_which_no_checkpoint_is_whole_is_not_started_again_silently(train, tmp_path):
    run = train("alone", tmp_path / "run", "--grpo.iterations=1")
    (run / "checkpoints" / "step_000001" / "common.pt").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint of .*run is whole \(step_000001: common"):
        train("alone", run, "--checkpoint.resume=auto", "--grpo.iterations=2")
    platform.destroy_distributed()


def test_only_the_newest_checkpoints_and_the_best_one_stay(train, tmp_path):
    options = ["--checkpoint.interval=1", "--checkpoint.keep=1", "--evaluation.interval=1"]
    run = train("alone", tmp_path / "run", *options)
    rewards = {row["iteration"]: row["eval_reward"] for row in tiny.metrics_rows(run)}
    best = max(rewards, key=rewards.get)
    expected = sorted({f"step_{n:06d}" for n in (4, best)})
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == expected


def test_a_run_without_a_checkpoint_cannot_be_resumed(train, tmp_path):
    run = train("alone", tmp_path / "run", killed_in=2)
    with pytest.raises(ValueError, match=r"checkpoint\.resume: .*run holds no checkpoint"):
        train("alone", run, RESUME)
    platform.destroy_distributed()


def test_saving_leaves_no_process_behind(train, tmp_path):
    """A helper that outlives a killed run would keep the pipe of its output open."""
    before = psutil.Process().children()
    train("alone", tmp_path / "run", "--grpo.iterations=1")
    assert (tmp_path / "run" / "checkpoints" / "step_000001").is_dir()
    assert psutil.Process().children() == before


def test_pictures_of_a_checkpoint_are_those_of_the_evaluation(recipe, straight, tmp_path, capsys):
    run, average, live = straight("alone"), tmp_path / "average", tmp_path / "live"
    expected = tiny.metrics_rows(run)[-1]["eval_reward"]
    capsys.readouterr()
    commands.sample(recipe, [f"--output={average}"], checkpoint=str(run))
    assert f"evaluation after iteration 4: reward {expected:.3f}" in capsys.readouterr().out
    assert len(list((average / "samples").glob("*.png"))) == 2 + 1
    # The newest one of a run, or any by name; without an average the live weights.
    first = run / "checkpoints" / "step_000002"
    no_average = [f"--output={live}", "--optimizer.ema_decay=0"]
    commands.sample(recipe, no_average, checkpoint=str(first))
    assert "evaluation after iteration 2" in capsys.readouterr().out


def test_weights_and_their_average_can_be_loaded_apart(recipe, straight, single_process):
    run = straight("alone")
    platform.initialize_distributed()
    config, _ = commands.load(recipe, [])
    experiment = tiny.start(config)
    rewards = {}
    for average in (True, False):
        load_weights(run / "checkpoints/step_000004", experiment.policy.model, average)
        rewards[average] = experiment.evaluator().run().reward_mean
    assert rewards[True] == tiny.metrics_rows(run)[-1]["eval_reward"]
    assert rewards[False] != rewards[True]


DAMAGES = {
    "missing": r"checkpoint .*copy.*manifest\.json",
    "not a checkpoint": r"checkpoint .*copy.*manifest\.json",
    "truncated": r"checkpoint .*copy is damaged: .*distcp has 1000 bytes instead of",
    "of another model": r"checkpoint .*copy cannot be read; it is .*of another model",
    "without an average": r"checkpoint .*copy cannot be read; .*optimizer\.ema_decay",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_does_not_fit_is_refused(recipe, train, straight, tmp_path, damage):
    copy, overrides = tmp_path / "copy", []
    checkpoint = straight("alone") / "checkpoints" / "step_000004"
    if damage == "not a checkpoint":
        copy.mkdir()
    elif damage == "without an average":
        run = train("alone", tmp_path / "run", "--grpo.iterations=1", "--optimizer.ema_decay=0")
        shutil.copytree(run / "checkpoints" / "step_000001", copy)
    elif damage != "missing":
        shutil.copytree(checkpoint, copy)
    if damage == "truncated":
        largest = max(copy.glob("*.distcp"), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:1000])
    if damage == "of another model":
        overrides = ["--model.preset=flux_tiny"]
    output = f"--output={tmp_path / 'samples'}"
    with pytest.raises(ValueError, match=DAMAGES[damage]) as error:
        commands.sample(recipe, [output, *overrides], checkpoint=str(copy))
    assert "\n" not in str(error.value)
    platform.destroy_distributed()
