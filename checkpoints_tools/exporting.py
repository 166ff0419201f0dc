# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A checkpoint to a diffusers transformer folder."""

from __future__ import annotations

import re

from checkpoints_tools.opening import Checkpoint, open_checkpoint
from megatron_leangrpo.models.saving import save_transformer_folder

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def export_weights(
    path: str, output: str, average: bool, max_shard_bytes: int
) -> tuple[Checkpoint, list[str]]:
    """Write the weights at `path`, or their average, as `output`; returns them and the file names.

    ``ValueError`` for what a user can cause; what is in `output` then stays as it was.
    """
    source = open_checkpoint(path, "--input", average=average)
    files = save_transformer_folder(output, source.config, source.theirs, max_shard_bytes)
    return source, files


def parse_size(text: str) -> int:
    """Bytes in a size as diffusers writes it: 500MB, 5GB, 10GiB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B)\s*", text.upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise ValueError(f"--max-shard-size = {text!r} is no size; valid: 500MB, 5GB, 10GiB ...")
    return size
