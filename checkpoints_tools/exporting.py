# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A checkpoint to a diffusers transformer folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_tools.adapters import find_adapters, merged_file, merged_run
from checkpoints_tools.opening import open_checkpoint
from megatron_leangrpo.models.common.conversion import TensorSource
from megatron_leangrpo.models.saving import (
    save_lora_folder,
    save_pipeline_folders,
    save_transformer_folder,
)

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Exported:
    """What has been written, and from where."""

    what: str
    path: Path
    step: int | None
    num_tensors: int
    files: list[str]


def export_weights(
    path: str,
    output: str,
    average: bool,
    max_shard_bytes: int,
    lora: str | None = None,
    merged: bool = False,
) -> Exported:
    """Write the weights at `path`, or their average, as `output`.

    A run that trained adapters is written as a LoRA file, or `merged` into its base; `lora` is a
    file to merge into whole weights. Two experts go into two folders of `output`, which may be a
    pipeline. ``ValueError`` for what a user can cause; what is in `output` then stays as it was.
    """
    adapters = find_adapters(path, "--input", average)
    what = "average" if average else ""
    if adapters is not None:
        if lora is not None:
            raise ValueError(f"--lora: --input = {path} holds adapters itself; give their base")
        if merged:
            config, weights, folders = merged_run(adapters)
            files = _save(output, config, weights, folders, max_shard_bytes)
            what = f"{what} weights with their adapters".strip()
            return Exported(what, adapters.path, adapters.step, len(weights), files)
        tensors = dict(adapters.tensors)
        written = save_lora_folder(output, adapters.projections, tensors)
        what = f"{what} adapters".strip()
        files = [file.name for file in written]
        return Exported(what, adapters.path, adapters.step, len(tensors), files)
    if merged:
        raise ValueError(f"--merged: --input = {path} holds no adapters; give a file as --lora")
    source = open_checkpoint(path, "--input", average=average)
    weights = source.theirs if lora is None else merged_file(source, lora)
    files = _save(output, source.config, weights, source.folders, max_shard_bytes)
    what = f"{what} weights".strip() + (f" with {lora}" if lora else "")
    return Exported(what, source.path, source.step, len(weights), files)


def _save(
    output: str,
    config: dict[str, Any],
    weights: TensorSource,
    folders: Sequence[str],
    max_shard_bytes: int,
) -> list[str]:
    if len(folders) == 1:
        return save_transformer_folder(output, config, weights, max_shard_bytes)
    return save_pipeline_folders(output, config, weights, folders, max_shard_bytes)


def parse_size(text: str) -> int:
    """Bytes in a size as diffusers writes it: 500MB, 5GB, 10GiB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B)\s*", text.upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise ValueError(f"--max-shard-size = {text!r} is no size; valid: 500MB, 5GB, 10GiB ...")
    return size
