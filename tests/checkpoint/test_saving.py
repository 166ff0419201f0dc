# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A save does not hold up the run, is all or nothing, and what goes wrong with it is said."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint import saving
from megatron_leangrpo.checkpoint.saving import CheckpointSaver
from megatron_leangrpo.checkpoint.store import damage, newest_valid, read_manifest
from megatron_leangrpo.grpo import commands
from megatron_leangrpo.grpo.trainer import Trainer
from megatron_leangrpo.models.flux.config import from_diffusers_config
from tests.checkpoint.test_resume import tensors_of
from tests.grpo import tiny

ITERATIONS = 4


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("recipe")
    config = tiny.tiny_config(
        tiny.write_prompts(folder),
        sampling={"num_steps": 2},
        grpo={"iterations": ITERATIONS, "prompts_per_iteration": 2, "group_size": 2},
        optimizer={"ema_decay": 0.9, "ema_interval": 1},
        checkpoint={"interval": 2},
    )
    return tiny.write_recipe(config, folder)


@pytest.fixture(scope="module")
def straight(recipe, tmp_path_factory) -> Path:
    return tiny.finished_run(recipe, tmp_path_factory.mktemp("straight") / "run")


def test_the_run_goes_on_and_what_is_written_is_as_it_was(recipe, straight, tmp_path):
    """The writer of iteration 2 may begin only when iteration 3 has changed every weight."""
    run, trained_on, write_files = tmp_path / "run", threading.Event(), saving._write_files
    train, seen = Trainer._train, []

    def write_later(folder: Path, *arguments: Any) -> Any:
        assert trained_on.wait(60)
        return write_files(folder, *arguments)

    def train_and_tell(self: Trainer, iteration: int) -> Any:
        if iteration == 2:
            seen.append(sorted(p.name for p in (run / "checkpoints").iterdir()))
        metrics = train(self, iteration)
        if iteration == 2:
            trained_on.set()
        return metrics

    with (
        mock.patch.object(saving, "_write_files", write_later),
        mock.patch.object(Trainer, "_train", train_and_tell),
    ):
        tiny.train_command(recipe, [f"--output={run}"])
    assert seen == [[".step_000002.tmp"]]
    for step in (2, 4):
        assert damage(run / "checkpoints" / f"step_{step:06d}") is None
        own, expected = tensors_of(run, step), tensors_of(straight, step)
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[name], expected[name]) for name in expected)
    platform.destroy_distributed()


def test_the_transformer_is_described_beside_its_weights(straight):
    for checkpoint in sorted((straight / "checkpoints").iterdir()):
        config = json.loads((checkpoint / "config.json").read_text())
        built = from_diffusers_config(config)
        assert (built.hidden_size, built.num_single_blocks) == (32, 1)


def fail_on_a_rank(recipe: str, output: str, failing: int) -> str:
    """A run whose disk fills up on one rank at the second save; the message of every rank."""
    write_files, saves = saving._write_files, []

    def full(folder: Path, *arguments: Any) -> Any:
        saves.append(folder)
        if len(saves) == 2 and platform.rank() == failing:
            (folder / f"__{failing}_0.distcp").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return write_files(folder, *arguments)

    with (
        mock.patch.object(saving, "_write_files", full),
        pytest.raises(RuntimeError) as raised,
    ):
        tiny.train_command(recipe, [f"--output={output}"])
    return str(raised.value)


@pytest.mark.parametrize(("world", "failing"), [(1, 0), (2, 1)])
def test_a_full_disk_is_told_by_every_rank_and_leaves_the_last_checkpoint(
    run_ranks, recipe, tmp_path, world, failing
):
    messages = run_ranks(world, fail_on_a_rank, recipe, str(tmp_path / "run"), failing)
    assert len(set(messages)) == 1
    assert "step_000004 cannot be written: OSError [Errno 28] No space left" in messages[0]
    assert "MiB are needed and" in messages[0]
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [p.name for p in checkpoints.iterdir()] == ["step_000002"]
    assert newest_valid(checkpoints).checkpoint == checkpoints / "step_000002"


def test_a_run_that_fails_lets_its_save_finish(recipe, tmp_path):
    """The save of iteration 2 is slower than iteration 3, in which the reward gives up."""
    run, failed, write_files = tmp_path / "run", threading.Event(), saving._write_files
    wait, train = CheckpointSaver.wait, Trainer._train

    def write_later(folder: Path, *arguments: Any) -> Any:
        assert failed.wait(60)
        return write_files(folder, *arguments)

    def train_or_fail(self: Trainer, iteration: int) -> Any:
        if iteration == 2:
            raise ValueError("the reward gives up")
        return train(self, iteration)

    def tell_and_wait(self: CheckpointSaver) -> None:
        failed.set()
        wait(self)

    with (
        mock.patch.object(saving, "_write_files", write_later),
        mock.patch.object(CheckpointSaver, "wait", tell_and_wait),
        mock.patch.object(Trainer, "_train", train_or_fail),
        pytest.raises(ValueError, match="the reward gives up"),
    ):
        tiny.train_command(recipe, [f"--output={run}"])
    platform.destroy_distributed()
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_000002"]
    assert damage(run / "checkpoints" / "step_000002") is None


def test_two_hundred_damages_of_a_runs_checkpoint_are_noticed_or_harmless(straight, tmp_path):
    """Every file of it, sizes weighed little: the small ones say what the large ones are."""
    folder = Path(shutil.copytree(straight / "checkpoints", tmp_path / "checkpoints"))
    checkpoint, before = folder / "step_000004", folder / "step_000002"
    files = sorted(checkpoint.iterdir())
    assert {".metadata", "__0_0.distcp", "common.pt", "config.json", "manifest.json"} <= {
        path.name for path in files
    }
    original, rng, kinds = {path: path.read_bytes() for path in files}, random.Random(0), Counter()
    for _ in range(200):
        path, kind = rng.choice(files), rng.choice(["flip", "cut", "delete"])
        content = bytearray(original[path])
        if kind == "flip":
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del content[rng.randrange(len(content)) :]
        path.unlink() if kind == "delete" else path.write_bytes(content)
        found = newest_valid(folder)
        if found.checkpoint == checkpoint:
            # White space of a manifest; what it says is as it was.
            assert path.name == "manifest.json" and read_manifest(checkpoint).iteration == 4
            kinds["harmless"] += 1
        else:
            assert found.checkpoint == before
            [reason] = found.skipped
            assert reason.startswith("step_000004: ") and path.name in reason
            kinds[kind] += 1
        path.write_bytes(original[path])
    assert damage(checkpoint) is None
    assert min(kinds[kind] for kind in ("flip", "cut", "delete")) > 40 and kinds["harmless"] < 10


def _partial_next(folder: Path) -> None:
    (folder / "step_000005").mkdir()
    for name in (".metadata", "common.pt", "config.json"):
        shutil.copy(folder / "step_000004" / name, folder / "step_000005")


def _zero_newest(folder: Path) -> None:
    for path in (folder / "step_000004").iterdir():
        path.write_bytes(b"")


def _copied_away(folder: Path) -> None:
    (folder / "step_000004").rename(folder.parent / "moved")
    (folder / "step_000004").symlink_to("/nowhere/at/all")


def _foreign(folder: Path) -> None:
    for name in ("backup copy", ".nfs000123", "step_0000049.tmp"):
        (folder / name).mkdir()
    (folder / "notes.txt").write_text("mine\n")


@pytest.mark.parametrize(
    ("break_", "resumed_after", "skipped"),
    [
        (_partial_next, 4, "step_000005: no readable manifest.json"),
        (_zero_newest, 2, "step_000004: no readable manifest.json"),
        (_copied_away, 2, "step_000004: no readable manifest.json"),
        (_foreign, 4, None),
    ],
)
def test_a_run_resumes_from_the_newest_whole_checkpoint_and_says_what_it_passed_over(
    recipe, straight, tmp_path, capsys, break_, resumed_after, skipped
):
    """HB18: what crashes and people leave among the checkpoints."""
    run = Path(shutil.copytree(straight, tmp_path / "run"))
    break_(run / "checkpoints")
    names = {path.name for path in (run / "checkpoints").iterdir()}
    capsys.readouterr()
    tiny.train_command(recipe, [f"--output={run}", "--checkpoint.resume=true"])
    platform.destroy_distributed()
    shown = " ".join(capsys.readouterr().out.split())
    assert f"resumed after iteration {resumed_after}: " in shown
    assert ("passed over checkpoint " in shown) == (skipped is not None)
    assert skipped is None or skipped in shown
    assert [row["iteration"] for row in tiny.metrics_rows(run)] == [1, 2, 3, 4]
    assert newest_valid(run / "checkpoints").checkpoint == run / "checkpoints" / "step_000004"
    # Nothing is lost: what had the name stands aside.
    assert names <= {path.name for path in (run / "checkpoints").iterdir()}


def test_an_import_is_told_from_a_run_by_its_iterations(straight):
    from checkpoints_tools.importing import import_weights

    checkpoint = straight / "checkpoints" / "step_000002"
    with pytest.raises(ValueError, match=r"is the checkpoint of a run; give another folder"):
        import_weights("flux", "anything", str(checkpoint))
    assert damage(checkpoint) is None


def test_a_checkpoint_is_sampled_without_its_run(recipe, straight, tmp_path, capsys):
    """Moved away from the run's configuration, it still says what it is."""
    moved = tmp_path / "moved"
    (straight / "checkpoints" / "step_000002").rename(moved)
    try:
        from checkpoints_tools.opening import open_checkpoint

        assert open_checkpoint(moved, "--input").family_name == "flux"
        commands.sample(recipe, [f"--output={tmp_path / 'samples'}"], checkpoint=str(moved))
    finally:
        moved.rename(straight / "checkpoints" / "step_000002")
