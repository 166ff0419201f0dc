# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What export and import leave in their output: the newest weights whole, or what was there."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoints_tools.exporting import export_weights, parse_size
from checkpoints_tools.importing import import_weights
from megatron_leangrpo.checkpoint.store import read_manifest, record_file, write_manifest
from megatron_leangrpo.models import saving
from megatron_leangrpo.models.common.conversion import InMemory
from tests.checkpoints_tools import published
from tests.command_line import files


@pytest.fixture
def two(flux, tmp_path) -> list[tuple[str, published.Tensors]]:
    """Two imported checkpoints with different weights."""
    checkpoints = []
    for n in (0, 1):
        tensors = {name: tensor + n for name, tensor in flux.items()}
        plain = published.save_folder(tmp_path / f"plain_{n}", tensors)
        import_weights("flux", str(plain), str(tmp_path / f"megatron_{n}"))
        checkpoints.append((str(tmp_path / f"megatron_{n}"), tensors))
    return checkpoints


@pytest.mark.parametrize("sizes", [(10**6, 10**5), (10**5, 10**6), (10**5, 10**9), (10**9, 10**5)])
def test_exporting_again_leaves_no_stale_shard_or_index(two, tmp_path, sizes):
    output = tmp_path / "out"
    for (checkpoint, tensors), size in zip(two, sizes):
        export_weights(checkpoint, str(output), False, size)
        assert published.same(published.read_folder(output), tensors)


def test_full_weights_replace_an_exported_adapter(two, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    save_file({"lora.weight": torch.zeros(1)}, output / "pytorch_lora_weights.safetensors")
    (output / "README.md").write_text("an adapter")
    checkpoint, tensors = two[0]
    export_weights(checkpoint, str(output), False, 10**9)
    assert published.same(published.read_folder(output), tensors)


class _Interrupted(Exception):
    pass


def test_an_export_that_fails_leaves_the_old_weights(two, tmp_path, monkeypatch):
    output = tmp_path / "out"
    export_weights(two[0][0], str(output), False, 10**9)
    before = files(tmp_path)

    def write(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise _Interrupted

    monkeypatch.setattr(saving, "_write_file", write)
    with pytest.raises(_Interrupted):
        export_weights(two[1][0], str(output), False, 10**9)
    assert files(tmp_path) == before


def test_what_a_killed_export_left_is_cleared_up_and_the_old_folder_restored(two, tmp_path):
    output = tmp_path / "out"
    export_weights(two[0][0], str(output), False, 10**9)
    # Killed between the two renames.
    output.rename(tmp_path / ".out.old")
    (tmp_path / ".out.tmp").mkdir()
    export_weights(two[1][0], str(output), False, 10**9)
    assert published.same(published.read_folder(output), two[1][1])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_full_disk_is_seen_before_anything_is_written(two, refuses, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    arguments = ["export", "--input", two[0][0], "--output", tmp_path / "out"]
    refuses(["--output: about 0.0 GB are needed", "are free"], *arguments)
    assert not (tmp_path / "out").exists()


def test_other_files_in_the_output_are_not_replaced(two, plain, refuses, tmp_path):
    output = tmp_path / "mine"
    output.mkdir()
    (output / "thesis.tex").write_text("years of work")
    export = ["export", "--input", two[0][0], "--output"]
    into = ["import", "--model", "flux", "--input", plain, "--output"]
    for arguments in (export, into):
        refuses(["holds thesis.tex, which would be lost"], *arguments, output)
    # Neither takes the other's folder, so that an input is never overwritten.
    refuses(["which would be lost"], *export, two[0][0])
    refuses(["which would be lost"], *into, plain)
    refuses(["is no folder"], *export, output / "thesis.tex")
    refuses(["cannot be written"], *export, output / "thesis.tex" / "out")
    assert (output / "thesis.tex").read_text() == "years of work"


def test_importing_again_replaces_the_checkpoint_but_never_that_of_a_run(
    two, plain, tools, refuses, tmp_path
):
    target = two[1][0]
    into = ["import", "--model", "flux", "--input", plain, "--output", target]
    assert tools(*into, "--tensor-model-parallel-size", 2).status == 0
    assert tools(*into).status == 0
    assert tools("verify", plain, target).status == 0
    write_manifest(Path(target), replace(read_manifest(Path(target)), iteration=3))
    refuses(["is the checkpoint of a run"], *into)


def test_a_changed_byte_in_a_checkpoint_is_not_exported(two, refuses, tmp_path):
    file = Path(two[0][0]) / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    arguments = ["export", "--input", two[0][0], "--output", tmp_path / "out"]
    refuses(["is damaged: the content of __0_0.distcp is not what was written"], *arguments)


class _Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "common.pt"])
def test_a_pickle_planted_under_a_valid_manifest_does_not_run(two, tools, plain, tmp_path, name):
    checkpoint, trace = Path(two[0][0]), tmp_path / "it ran"
    planted = checkpoint / name
    if name == ".metadata":
        planted.write_bytes(pickle.dumps(_Touch(trace)))
    else:
        torch.save({"content": _Touch(trace)}, planted)
    manifest = read_manifest(checkpoint)
    files = {**manifest.files, name: record_file(planted)}
    write_manifest(checkpoint, replace(manifest, files=files))
    for arguments in (
        ["export", "--input", checkpoint, "--output", tmp_path / "out"],
        ["verify", plain, checkpoint],
        ["inspect", checkpoint],
    ):
        outcome = tools(*arguments)
        assert not trace.exists()
        # Nobody reads common.pt; the names and shapes are not in the data.
        reads = name == ".metadata" or (name == "__0_0.distcp" and arguments[0] != "inspect")
        assert outcome.status == (2 if reads else 0 if arguments[0] != "verify" else outcome.status)
        assert "cannot be read" in outcome.err or not reads
    assert not (tmp_path / "out").exists() or name == "common.pt"
    pickle.loads(pickle.dumps(_Touch(trace)))
    assert trace.exists()


def test_a_checkpoint_of_a_newer_version_is_refused(two, refuses):
    manifest = Path(two[0][0]) / "manifest.json"
    content = {**json.loads(manifest.read_text()), "format": 99}
    manifest.write_text(json.dumps(content))
    refuses(["format 99 is newer than this version reads"], "inspect", two[0][0])


def test_a_checkpoint_without_average_has_none_to_export(two, refuses, tmp_path):
    arguments = ["export", "--input", two[0][0], "--output", tmp_path / "out", "--average"]
    refuses(["holds no weight average"], *arguments)


def test_sizes_of_shards_are_read_as_diffusers_writes_them(refuses, tmp_path):
    assert [parse_size(text) for text in ("500MB", "1.5 gb", "2KiB")] == [
        500 * 10**6,
        1_500_000_000,
        2048,
    ]
    for text in ("big", "0GB", "-1GB", "5"):
        with pytest.raises(ValueError, match=r"valid: 500MB"):
            parse_size(text)


def test_a_tensor_larger_than_a_shard_has_a_file_of_its_own(tmp_path):
    tensors = {"a": torch.ones(4), "large": torch.ones(100), "b": torch.ones(4)}
    names = saving.save_transformer_folder(tmp_path / "out", {}, InMemory(tensors), 40)
    assert len(names) == 3
    assert published.same(published.read_folder(tmp_path / "out"), tensors)
