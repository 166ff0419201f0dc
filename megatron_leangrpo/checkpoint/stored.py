# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Weights in megatron's distributed format (torch_dist), a tensor at a time and without ranks.

torch's and megatron's own code holds a whole model in memory on its way to or from these files.
What is written here is what megatron writes: `.metadata` says which bytes of which `.distcp` file
are which chunk of which tensor, and each chunk is a tensor that `torch.save` has written.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_leangrpo.checkpoint.store import FileRecord, RecordedFile, read_manifest
from megatron_leangrpo.checkpoint.unpickling import load_data
from megatron_leangrpo.models.common.conversion import TensorInfo, TensorSource

AVERAGE = "average."
# The optimizer's state and the scales of FP8.
_NO_WEIGHTS = ("optimizer.", "fp8.")
_METADATA = ".metadata"


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class StoredTensors(TensorSource):
    """The weights of a checkpoint under our names, or their average; each read when asked for.

    Reads checkpoints of a run and imported ones, whatever layout wrote them. ``ValueError`` where
    the folder is no checkpoint or cannot be read; `store.damage` says whether files have changed.
    """

    def __init__(self, checkpoint: Path, average: bool = False) -> None:
        self.checkpoint = checkpoint
        self.manifest = read_manifest(checkpoint)
        self._chunks: dict[str, list[_Chunk]] = {}
        self._layout: dict[str, TensorInfo] = {}
        metadata = self._read_metadata()
        self.has_average = any(name.startswith(AVERAGE) for name in metadata)
        if average and not self.has_average:
            raise ValueError(
                f"checkpoint {checkpoint} holds no weight average (optimizer.ema_decay was 0)"
            )
        for name, (info, chunks) in metadata.items():
            if name.startswith(_NO_WEIGHTS) or name.startswith(AVERAGE) != average:
                continue
            own = name.removeprefix(AVERAGE)
            self._layout[own], self._chunks[own] = info, chunks

    def _read_metadata(self) -> dict[str, tuple[TensorInfo, list[_Chunk]]]:
        try:
            with (self.checkpoint / _METADATA).open("rb") as file:
                metadata = load_data(file)
            tensors = {}
            stored = {}
            for index, place in metadata.storage_data.items():
                stored[index.fqn, tuple(index.offset or ())] = place
            for name, tensor in metadata.state_dict_metadata.items():
                if not hasattr(tensor, "chunks"):
                    continue
                info = TensorInfo(tuple(tensor.size), tensor.properties.dtype)
                chunks = []
                for chunk in tensor.chunks:
                    place = stored[name, tuple(chunk.offsets)]
                    if Path(place.relative_path).name != place.relative_path:
                        raise ValueError(f"{name} is said to be in {place.relative_path!r}")
                    chunks.append(
                        _Chunk(
                            tuple(chunk.offsets),
                            tuple(chunk.sizes),
                            place.relative_path,
                            place.offset,
                            place.length,
                        )
                    )
                tensors[name] = (info, chunks)
            return tensors
        except Exception as error:  # A damaged pickle can raise anything.
            raise self._unreadable(_METADATA, error) from error

    def _unreadable(self, what: str, error: Exception) -> ValueError:
        lines = str(error).strip().splitlines() or [""]
        return ValueError(
            f"checkpoint {self.checkpoint} cannot be read: {what}: {type(error).__name__} "
            f"{lines[0]:.200}"
        )

    @property
    def layout(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        return self._layout

    def parts(self) -> int:
        """Into how many chunks the most divided tensor is cut: the tensor-parallel size it has."""
        return max((len(chunks) for chunks in self._chunks.values()), default=1)

    def __getitem__(self, name: str) -> torch.Tensor:
        info = self._layout[name]
        try:
            chunks = [(chunk, self._read_chunk(chunk)) for chunk in self._chunks[name]]
            if sum(data.numel() for _, data in chunks) != info.num_elements:
                raise ValueError(f"the chunks of {name} do not make up its {info.num_elements}")
            if len(chunks) == 1:
                return chunks[0][1]
            full = torch.empty(info.shape, dtype=info.dtype)
            for chunk, data in chunks:
                place = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes))
                full[place] = data
            return full
        except Exception as error:
            raise self._unreadable(name, error) from error

    def _read_chunk(self, chunk: _Chunk) -> torch.Tensor:
        with (self.checkpoint / chunk.file).open("rb") as file:
            file.seek(chunk.start)
            data = file.read(chunk.length)
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if tuple(tensor.shape) != chunk.sizes:
            raise ValueError(f"a chunk has shape {tuple(tensor.shape)} instead of {chunk.sizes}")
        return tensor


def write_tensors(
    folder: Path, tensors: TensorSource, shard_dims: Mapping[str, int | None], parts: int
) -> dict[str, FileRecord]:
    """Write weights into an empty folder as a megatron checkpoint; returns sizes and checksums.

    A tensor with a shard dimension is cut into `parts` along it, one file a part, so that as many
    tensor-parallel ranks read no more than their own. Any other size can read them too.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    names = [f"__{part}_0.distcp" for part in range(parts)]
    places: dict[MetadataIndex, _StorageInfo] = {}
    described: dict[str, Any] = {}
    with ExitStack() as stack:
        files = [RecordedFile(stack.enter_context((folder / n).open("wb"))) for n in names]
        for name in tensors.layout:
            full, dim = tensors[name], shard_dims[name]
            chunks, offset = [], [0] * full.dim()
            for part, data in enumerate((full,) if dim is None else full.chunk(parts, dim)):
                # Of a view, all it is a part of would be saved.
                data = data.clone(memory_format=torch.contiguous_format)
                start = files[part].size
                torch.save(data, files[part])
                index = MetadataIndex(name, torch.Size(offset))
                places[index] = _StorageInfo(names[part], start, files[part].size - start)
                chunks.append(ChunkStorageMetadata(torch.Size(offset), data.shape))
                if dim is not None:
                    offset[dim] += data.shape[dim]
            properties = TensorProperties.create_from_tensor(full)
            described[name] = TensorStorageMetadata(properties, full.shape, chunks)
            del full, data
    small = {**described_by(Metadata(described), places), "common.pt": _empty_common()}
    records = {name: file.record() for name, file in zip(names, files)}
    for name, content in small.items():
        (folder / name).write_bytes(content)
        records[name] = FileRecord(len(content), hashlib.sha256(content).hexdigest())
    return records


def described_by(metadata: Any, places: Mapping[Any, Any]) -> dict[str, bytes]:
    """The files that describe a checkpoint whose tensors are at `places` (torch's index to its
    storage info)."""
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
    from torch.distributed.checkpoint.metadata import StorageMeta

    metadata.storage_data, metadata.storage_meta = dict(places), StorageMeta()
    metadata.version = CURRENT_DCP_VERSION
    return {
        _METADATA: pickle.dumps(metadata),
        "metadata.json": json.dumps(
            {
                "sharded_backend": "torch_dist",
                "sharded_backend_version": 1,
                "common_backend": "torch",
                "common_backend_version": 1,
            }
        ).encode(),
    }


def _empty_common() -> bytes:
    """megatron looks for what is no tensor in `common.pt`."""
    buffer = io.BytesIO()
    torch.save({}, buffer)
    return buffer.getvalue()
