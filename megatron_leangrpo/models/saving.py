# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Writes diffusers transformer folders, a tensor at a time."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_leangrpo.files import replaced_folder
from megatron_leangrpo.models.common.conversion import InMemory, TensorInfo, TensorSource
from megatron_leangrpo.models.common.lora_targets import LowRank
from megatron_leangrpo.models.loading import CONFIG, INDEX, WEIGHTS
from megatron_leangrpo.models.lora_config import metadata_for_diffusers, names_in_file
from megatron_leangrpo.models.lora_files import WEIGHTS as LORA_WEIGHTS

MAX_SHARD_BYTES = 10 * 1000**3
"""Diffusers' default."""

# What an earlier export may have left: full weights, an adapter, a model card.
_OURS = re.compile(
    r"config\.json|README\.md|diffusion_pytorch_model.*\.safetensors(\.index\.json)?"
    r"|pytorch_lora_weights\.safetensors|adapter_config\.json"
)
# The dtypes that weights may have, under safetensors' names.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def save_transformer_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    setting: str = "--output",
) -> list[str]:
    """Write a folder that diffusers' `from_pretrained` reads; one process only.

    The folder is replaced as a whole when its successor is complete; nothing of an older save
    stays. Returns the names of the weight files. ``ValueError`` where the folder holds other files
    or the disk has too little space.
    """
    source = tensors if isinstance(tensors, TensorSource) else InMemory(tensors)
    folder = Path(folder).absolute()
    shards = _shards(source.layout, max_shard_bytes)
    total = sum(info.num_bytes for info in source.layout.values())
    with replaced_folder(folder, _OURS, setting) as temporary:
        check_space(temporary, total, setting)
        names = _file_names(len(shards))
        for name, layout in zip(names, shards):
            _write_file(temporary / name, layout, source)
        if len(shards) > 1:
            weight_map = {t: name for name, layout in zip(names, shards) for t in layout}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        text = json.dumps(dict(config), indent=2) + "\n"
        (temporary / CONFIG).write_text(text, encoding="utf-8")
    return names


def check_space(folder: Path, needed: int, setting: str) -> None:
    """Raise ``ValueError`` where a disk is too full for what is about to be written."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"{setting}: about {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free "
            f"in {folder.parent}"
        )


def _shards(layout: Mapping[str, TensorInfo], max_bytes: int) -> list[dict[str, TensorInfo]]:
    """Tensors in their order, as many in a file as fit; a larger tensor has a file of its own."""
    shards: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in layout.items():
        if shards[-1] and size + info.num_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = info
        size += info.num_bytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [WEIGHTS]
    stem = WEIGHTS.removesuffix(".safetensors")
    return [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def save_lora_folder(
    folder: str | Path,
    projections: Mapping[str, LowRank],
    tensors: Mapping[str, torch.Tensor],
    setting: str = "--output",
) -> Path:
    """Write a folder that a diffusers pipeline's `load_lora_weights` takes; one process only.

    `tensors` are A and B of every projection under PEFT's names. Returns the weight file. Replaces
    an older export as a whole, and raises, like `save_transformer_folder`.
    """
    source = InMemory(names_in_file(tensors))
    total = sum(info.num_bytes for info in source.layout.values())
    with replaced_folder(Path(folder).absolute(), _OURS, setting) as temporary:
        check_space(temporary, total, setting)
        metadata = metadata_for_diffusers(projections)
        _write_file(temporary / LORA_WEIGHTS, source.layout, source, metadata)
    return Path(folder) / LORA_WEIGHTS


def _write_file(
    path: Path,
    layout: Mapping[str, TensorInfo],
    source: TensorSource,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """A safetensors file; the library's own writer wants all tensors of a file in memory."""
    with path.open("wb") as file:
        file.write(_header(layout, metadata or {}))
        for name, info in layout.items():
            tensor = source[name]
            assert (tuple(tensor.shape), tensor.dtype) == (info.shape, info.dtype), name
            file.write(memoryview(_bytes_of(tensor)))


def _header(layout: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, info in layout.items():
        end = offset + info.num_bytes
        entries[name] = {
            "dtype": DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
