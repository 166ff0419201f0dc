# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Finds the files of a checkpoint in whatever a user points at; reads no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_leangrpo.checkpoint.store import MANIFEST, newest_valid
from megatron_leangrpo.models.loading import CONFIG, INDEX, WEIGHTS, read_json

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pickle", ".pkl")
_PIPELINE = "model_index.json"
_SECOND = "transformer_2"


@dataclass(frozen=True)
class SafetensorsInput:
    """Weight files and what is said about them."""

    weights: Path
    """A folder with diffusers' file names, an index, or a single file."""
    config_path: Path
    config: dict[str, Any] | None
    """The `config.json` beside them; None where there is none."""


def find_input(path: Path, setting: str) -> SafetensorsInput | Path:
    """Safetensors files with their configuration, or the folder of a megatron checkpoint.

    Takes a transformer or pipeline folder, a file, a checkpoint, or a run (its newest whole one).
    ``ValueError`` where none of that is there.
    """
    if path.is_file():
        return _file(path, setting)
    if not path.is_dir():
        raise ValueError(f"{setting}: {path} does not exist; give a checkpoint's folder or file")
    if (path / MANIFEST).is_file() or (path / "metadata.json").is_file():
        return path
    if (path / "checkpoints").is_dir():
        found = newest_valid(path / "checkpoints")
        if found.checkpoint is None:
            reasons = f" ({'; '.join(found.skipped)})" if found.skipped else ""
            raise ValueError(f"{setting}: no checkpoint of the run {path} is whole{reasons}")
        return found.checkpoint
    if (path / _PIPELINE).is_file():
        return _pipeline(path, setting)
    return _folder(path, setting)


def _pipeline(path: Path, setting: str) -> SafetensorsInput | Path:
    if (path / _SECOND).is_dir():
        raise ValueError(
            f"{setting}: {path} holds two transformers; convert {path / 'transformer'} and "
            f"{path / _SECOND} one after the other"
        )
    if not (path / "transformer").is_dir():
        raise ValueError(f"{setting}: {path} is a pipeline without transformer/")
    return _folder(path / "transformer", setting)


def _folder(path: Path, setting: str) -> SafetensorsInput:
    if (path / WEIGHTS).is_file() or (path / INDEX).is_file():
        return _with_config(path, path)
    indices = sorted(path.glob("*.safetensors.index.json"))
    files = indices or sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return _with_config(files[0], path)
    if files:
        names = ", ".join(file.name for file in files[:4])
        raise ValueError(
            f"{setting}: {path} holds several weight files and no index that names them ({names}); "
            "give the path of one file"
        )
    pickles = sorted(p for p in path.iterdir() if p.suffix in _PICKLES)
    if pickles:
        raise _is_pickle(pickles[0], setting)
    raise ValueError(
        f"{setting}: {path} holds neither {WEIGHTS} nor {INDEX}, and is no megatron checkpoint"
    )


def _file(path: Path, setting: str) -> SafetensorsInput:
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return _with_config(path, path.parent)
    if path.suffix in _PICKLES:
        raise _is_pickle(path, setting)
    raise ValueError(
        f"{setting}: {path} is no safetensors file; give a .safetensors file or a folder"
    )


def _is_pickle(path: Path, setting: str) -> ValueError:
    return ValueError(
        f"{setting}: {path} is a pickle, which can run any program when it is read; convert it to "
        "safetensors first (safetensors.torch.save_file, or diffusers' save_pretrained)"
    )


def _with_config(weights: Path, folder: Path) -> SafetensorsInput:
    path = folder / CONFIG
    return SafetensorsInput(weights, path, read_json(path, "config") if path.is_file() else None)
