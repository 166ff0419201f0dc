# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which checkpoint of a folder is taken, what is noticed, and what is removed."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from megatron_leangrpo.checkpoint.store import (
    MANIFEST,
    Manifest,
    checkpoints,
    damage,
    newest_valid,
    prune,
    publish,
    read_manifest,
    record_file,
    step_folder,
    temporary_folder,
    write_manifest,
)


def make(folder: Path, iteration: int, reward: float | None = None) -> Path:
    """A checkpoint of two small files."""
    temporary = temporary_folder(folder, iteration)
    temporary.mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata"):
        (temporary / name).write_bytes(f"{name} {iteration}".encode() * 20)
    files = {path.name: record_file(path) for path in temporary.iterdir()}
    write_manifest(temporary, Manifest(iteration, reward, [[0, 3, 0.1 + 0.2]], files))
    return publish(folder, iteration)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Checkpoints 9 and 10: by name, 9 would be the newer one without the leading zeros."""
    for iteration in (9, 10):
        make(tmp_path / "checkpoints", iteration)
    return tmp_path / "checkpoints"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_the_one_with_the_largest_number(folder):
    for odd in ("step_8", "step_0000000007"):
        shutil.copytree(step_folder(folder, 9), folder / odd)
    assert [number for number, _ in checkpoints(folder)] == [10, 9, 8, 7]
    assert newest_valid(folder).checkpoint == step_folder(folder, 10)


def test_a_manifest_is_read_as_it_was_written(folder):
    manifest = read_manifest(step_folder(folder, 10))
    assert (manifest.iteration, manifest.reward) == (10, None)
    # Resumed runs are compared bit for bit.
    assert manifest.window_scores == [[0, 3, 0.1 + 0.2]]


def _partial(folder: Path) -> None:
    step_folder(folder, 11).mkdir()
    shutil.copy(step_folder(folder, 10) / ".metadata", step_folder(folder, 11))


def _copied_away(folder: Path) -> None:
    shutil.rmtree(step_folder(folder, 11), ignore_errors=True)
    step_folder(folder, 11).symlink_to("/nowhere/at/all")


def _zeroed(folder: Path) -> None:
    for path in make(folder, 11).iterdir():
        path.write_bytes(b"")


def _foreign(folder: Path) -> None:
    for name in ("backup copy", ".nfs000123", "step_000010.9.tmp", "step_000012.tmp"):
        (folder / name).mkdir()
    (folder / "notes.txt").write_text("mine\n")
    _newer_format(folder)


def _newer_format(folder: Path) -> None:
    manifest = make(folder, 11) / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))


def _file_of_another_step(folder: Path) -> None:
    newest = make(folder, 11)
    shutil.copy(step_folder(folder, 9) / "__0_0.distcp", newest)


@pytest.mark.parametrize(
    ("break_", "reason"),
    [
        (_partial, "no readable manifest.json"),
        (lambda folder: step_folder(folder, 11).mkdir(), "no readable manifest.json"),
        (_zeroed, "no readable manifest.json"),
        (_copied_away, "no readable manifest.json"),
        (_foreign, "format 99 is newer than this version reads"),
        (_file_of_another_step, "__0_0.distcp has 280 bytes instead of 300"),
    ],
)
def test_a_broken_newest_checkpoint_is_passed_over_with_a_reason(folder, break_, reason):
    break_(folder)
    before = names(folder)
    found = newest_valid(folder)
    assert found.checkpoint == step_folder(folder, 10)
    [skipped] = found.skipped
    assert skipped.startswith("step_000011: ") and reason in skipped
    assert names(folder) == before


def test_two_hundred_kinds_of_damage_are_all_noticed(folder):
    rng = random.Random(0)
    checkpoint = step_folder(folder, 10)
    files = sorted(path for path in checkpoint.iterdir())
    original = {path: path.read_bytes() for path in files}
    for _ in range(200):
        path = rng.choice(files)
        content = bytearray(original[path])
        kind = rng.choice(["flip", "cut", "delete", "extend"])
        if kind == "flip":
            position = rng.randrange(len(content))
            content[position] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            content = content[: rng.randrange(len(content))]
        elif kind == "extend":
            content += b"more"
        path.unlink() if kind == "delete" else path.write_bytes(content)
        found = newest_valid(folder)
        if found.checkpoint == checkpoint:
            # White space of the manifest is the one thing that may change.
            assert path.name == MANIFEST
            assert read_manifest(checkpoint).iteration == 10
            assert kind in ("flip", "cut")
        else:
            assert found.checkpoint == step_folder(folder, 9)
            assert len(found.skipped) == 1 and len(found.skipped[0]) < 300
        path.write_bytes(original[path])
    assert damage(checkpoint) is None


def test_pruning_keeps_the_newest_and_the_best_and_what_is_not_ours(folder):
    make(folder, 2, reward=0.9)
    make(folder, 3, reward=0.8)
    (folder / "step_000001").mkdir()
    (folder / "notes.txt").write_text("mine\n")
    removed = prune(folder, keep=1)
    assert [path.name for path in removed] == ["step_000009", "step_000003"]
    assert names(folder) == ["notes.txt", "step_000001", "step_000002", "step_000010"]
    assert prune(folder, keep=1) == []


def test_a_folder_that_has_the_name_already_is_put_aside(folder):
    step_folder(folder, 11).mkdir()
    (step_folder(folder, 11) / "half").write_text("written")
    make(folder, 11)
    assert damage(step_folder(folder, 11)) is None
    assert (folder / "step_000011.invalid-1" / "half").read_text() == "written"
