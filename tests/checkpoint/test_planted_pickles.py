# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A pickle that somebody planted in a checkpoint does not run, even under a valid manifest."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.store import (
    newest_valid,
    read_manifest,
    record_file,
    write_manifest,
)
from megatron_leangrpo.grpo import commands
from tests.grpo import tiny


class _Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[str, Path]:
    """A recipe and a run of it with one checkpoint."""
    folder = tmp_path_factory.mktemp("planted")
    config = tiny.tiny_config(
        tiny.write_prompts(folder), grpo={"iterations": 1}, checkpoint={"interval": 1}
    )
    recipe = tiny.write_recipe(config, folder)
    tiny.train_command(recipe, [f"--output={folder / 'run'}"])
    platform.destroy_distributed()
    return recipe, folder / "run"


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_a_planted_pickle_does_not_run(run, tmp_path, name):
    recipe, original = run
    folder = Path(shutil.copytree(original, tmp_path / "run"))
    checkpoint = newest_valid(folder / "checkpoints").checkpoint
    planted, trace = checkpoint / name, tmp_path / "it ran"
    if name == ".metadata":
        planted.write_bytes(pickle.dumps(_Touch(trace)))
    else:
        torch.save({"content": _Touch(trace)}, planted)
    # Whoever plants it can also count its bytes.
    manifest = read_manifest(checkpoint)
    files = {**manifest.files, name: record_file(planted)}
    write_manifest(checkpoint, replace(manifest, files=files))
    refused = pytest.raises(ValueError, match="cannot be read; it is damaged")
    with refused:
        commands.sample(recipe, [f"--output={tmp_path / 'out'}"], checkpoint=str(checkpoint))
    with refused:
        overrides = [f"--output={folder}", "--grpo.iterations=2", "--checkpoint.resume=true"]
        tiny.train_command(recipe, overrides)
    platform.destroy_distributed()
    assert not trace.exists()
    # The test can fail: read the ordinary way, it would have run.
    pickle.loads(pickle.dumps(_Touch(trace)))
    assert trace.exists()
