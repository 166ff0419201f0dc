# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Published weights to a megatron distributed checkpoint."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from checkpoints_tools.opening import Checkpoint, open_checkpoint
from megatron_leangrpo.checkpoint.store import (
    Manifest,
    read_manifest,
    record_file,
    write_manifest,
)
from megatron_leangrpo.checkpoint.stored import write_tensors
from megatron_leangrpo.files import check_replaceable, replaced_folder
from megatron_leangrpo.models.loading import CONFIG
from megatron_leangrpo.models.saving import check_space

_OURS = re.compile(
    r"__\d+_\d+\.distcp|\.metadata|metadata\.json|common\.pt|manifest\.json|config\.json"
)


def import_weights(
    family_name: str, path: str, output: str, tensor_parallel: int = 1
) -> Checkpoint:
    """Write the weights at `path` as a checkpoint that loads at any tensor-parallel size.

    It is cut for `tensor_parallel` ranks: as many read it fastest. Returns what was read.
    ``ValueError`` for what a user can cause; what is in `output` then stays as it was.
    """
    target = Path(output).absolute()
    check_replaceable(target, _OURS, "--output")
    if target.is_dir() and any(target.iterdir()) and not _is_import(target):
        raise ValueError(f"--output = {output} is the checkpoint of a run; give another folder")
    source = open_checkpoint(path, "--input", family_name)
    if source.format == "megatron":
        raise ValueError(f"--input: {source.path} is a megatron checkpoint already")
    _check_tensor_parallel(source, tensor_parallel)
    weights = source.ours
    with replaced_folder(target, _OURS, "--output") as temporary:
        check_space(temporary, sum(i.num_bytes for i in weights.layout.values()), "--output")
        files = write_tensors(temporary, weights, source.shard_dims, tensor_parallel)
        config = temporary / CONFIG
        config.write_text(json.dumps(source.config, indent=2) + "\n", encoding="utf-8")
        files[CONFIG] = record_file(config)
        write_manifest(temporary, Manifest(iteration=0, files=files))
    return source


def _is_import(checkpoint: Path) -> bool:
    """Whether a checkpoint was imported: those of a run have finished an iteration."""
    try:
        return read_manifest(checkpoint).iteration == 0
    except ValueError:
        return False


def _check_tensor_parallel(source: Checkpoint, size: int) -> None:
    """Raise ``ValueError`` for a size that does not divide the model."""
    try:
        replace(source.settings, tensor_model_parallel_size=size)
    except ValueError as error:
        raise ValueError(f"--tensor-model-parallel-size = {size}: {error}") from error
