# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Reads megatron's checkpoints without running what somebody may have planted in one.

torch describes a checkpoint in a pickle (`.metadata`), and megatron stores what is no tensor in
others. A pickle can call anything. While `only_data` is active, those files may name the classes of
the format and nothing else.
"""

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import torch

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size",
        "bfloat16",
        "bool",
        "device",
        "float16",
        "float32",
        "float64",
        "int32",
        "int64",
        "uint8",
    },
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
}


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def load_data(file: IO[bytes]) -> Any:
    """Unpickle a file that may name classes of the checkpoint format only."""
    return _DataUnpickler(file).load()


@contextmanager
def only_data() -> Iterator[None]:
    """Make torch and megatron read their pickles like this, whatever they ask for."""
    import torch.distributed.checkpoint.filesystem as filesystem

    load = torch.load

    def load_weights_only(*arguments: Any, **options: Any) -> Any:
        return load(*arguments, **{**options, "weights_only": True})

    pickles = SimpleNamespace(
        **{name: getattr(pickle, name) for name in dir(pickle) if not name.startswith("__")}
    )
    pickles.load = load_data
    pickles.loads = lambda data: load_data(io.BytesIO(data))
    with (
        mock.patch.object(filesystem, "pickle", pickles),
        mock.patch.object(torch, "load", load_weights_only),
    ):
        yield
