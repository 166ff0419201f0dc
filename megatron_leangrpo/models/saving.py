# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Writes diffusers transformer folders, a tensor at a time."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from megatron_leangrpo.files import replaced_folder
from megatron_leangrpo.models.common.conversion import InMemory, TensorInfo, TensorSource
from megatron_leangrpo.models.common.lora_targets import LowRank
from megatron_leangrpo.models.experts import of_one
from megatron_leangrpo.models.loading import CONFIG, INDEX, PIPELINE_INDEX, WEIGHTS
from megatron_leangrpo.models.lora_config import (
    by_component,
    metadata_for_diffusers,
    names_in_file,
)
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
    with replaced_folder(Path(folder).absolute(), _OURS, setting) as temporary:
        check_space(temporary, _size(source), setting)
        return _write_transformer(temporary, config, source, max_shard_bytes)


def save_pipeline_folders(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: TensorSource,
    names: Sequence[str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    setting: str = "--output",
) -> list[str]:
    """Write transformers of one architecture into a pipeline folder, each into that of its name.

    `tensors` are named `name.tensor`. The folders are replaced when all are complete; what else the
    pipeline has stays. Otherwise like `save_transformer_folder`.
    """
    folder = Path(folder).absolute()
    _check_pipeline(folder, names, setting)
    with ExitStack() as stack:
        temporaries = [
            stack.enter_context(replaced_folder(folder / name, _OURS, setting)) for name in names
        ]
        check_space(temporaries[0], _size(tensors), setting)
        return [
            f"{name}/{file}"
            for name, temporary in zip(names, temporaries)
            for file in _write_transformer(
                temporary, config, of_one(tensors, name), max_shard_bytes
            )
        ]


def _check_pipeline(folder: Path, names: Sequence[str], setting: str) -> None:
    """Raise ``ValueError`` where a folder is neither a pipeline's nor an earlier export."""
    if (folder / PIPELINE_INDEX).is_file() or not folder.is_dir():
        return
    left_over = tuple(f".{name}." for name in names)
    foreign = sorted(
        path.name
        for path in folder.iterdir()
        if path.name not in (*names, "README.md") and not path.name.startswith(left_over)
    )
    if foreign:
        raise ValueError(
            f"{setting} = {folder} holds {foreign[0]} and no {PIPELINE_INDEX}; {', '.join(names)} "
            "go into an empty or new folder, or into a pipeline's"
        )


def _write_transformer(
    folder: Path, config: Mapping[str, Any], source: TensorSource, max_shard_bytes: int
) -> list[str]:
    shards = _shards(source.layout, max_shard_bytes)
    names = _file_names(len(shards))
    for name, layout in zip(names, shards):
        _write_file(folder / name, layout, source)
    if len(shards) > 1:
        weight_map = {t: name for name, layout in zip(names, shards) for t in layout}
        index = {"metadata": {"total_size": _size(source)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    text = json.dumps(dict(config), indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    return names


def _size(source: TensorSource) -> int:
    return sum(info.num_bytes for info in source.layout.values())


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
) -> list[Path]:
    """Write a folder that a diffusers pipeline's `load_lora_weights` takes; one process only.

    `tensors` are A and B of every projection under PEFT's names. Returns the weight files: where a
    transformer's name stands before the projections', its adapters go into a folder of that name.
    Replaces an older export as a whole, and raises, like `save_transformer_folder`.
    """
    folder = Path(folder).absolute()
    parts, numbers = by_component(projections), by_component(tensors)
    if "" not in parts:
        _check_adapters_of_two(folder, list(parts), setting)
    with ExitStack() as stack:
        for name, own in parts.items():
            temporary = stack.enter_context(replaced_folder(folder / name, _OURS, setting))
            source = InMemory(names_in_file(numbers[name]))
            check_space(temporary, _size(source), setting)
            metadata = metadata_for_diffusers(own)
            _write_file(temporary / LORA_WEIGHTS, source.layout, source, metadata)
    return [folder / name / LORA_WEIGHTS for name in parts]


def _check_adapters_of_two(folder: Path, names: Sequence[str], setting: str) -> None:
    """Refuse a pipeline, too: the adapters would take the place of its weights."""
    if (folder / PIPELINE_INDEX).is_file():
        raise ValueError(
            f"{setting} = {folder} is a pipeline, whose weights adapters must not replace; give an "
            "empty or new folder"
        )
    _check_pipeline(folder, names, setting)


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
