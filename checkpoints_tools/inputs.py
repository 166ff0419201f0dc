# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Finds the files of a checkpoint in whatever a user points at; reads no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_leangrpo.checkpoint.store import MANIFEST, newest_valid
from megatron_leangrpo.models.loading import CONFIG, INDEX, PIPELINE_INDEX, WEIGHTS, read_json

FOLDERS = ("transformer", "transformer_2")
"""Of the experts in a pipeline, high noise first."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pickle", ".pkl")
_PAIRS = (FOLDERS, ("high_noise_model", "low_noise_model"))
"""Folders of two experts: diffusers', and those of the authors of Wan 2.2."""


@dataclass(frozen=True)
class SafetensorsInput:
    """Weight files and what is said about them."""

    weights: Path
    """A folder with diffusers' file names, an index, or a single file."""
    config_path: Path
    config: dict[str, Any] | None
    """The `config.json` beside them; None where there is none."""


@dataclass(frozen=True)
class ExpertsInput:
    """Two transformers that take turns, for high noise and for low."""

    path: Path
    high: SafetensorsInput
    low: SafetensorsInput


def find_input(path: Path, setting: str) -> SafetensorsInput | ExpertsInput | Path:
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
    if (path / PIPELINE_INDEX).is_file():
        return _pipeline(path, setting)
    pair = next((pair for pair in _PAIRS if any((path / name).is_dir() for name in pair)), None)
    if pair is None:
        return _folder(path, setting)
    # A run exports a single transformer into a folder of that name, too.
    is_single = pair == FOLDERS and not (path / FOLDERS[1]).is_dir()
    return _transformers(path, pair[:1] if is_single else pair, setting)


def _pipeline(path: Path, setting: str) -> SafetensorsInput | ExpertsInput:
    index = read_json(path / PIPELINE_INDEX, setting)
    second = FOLDERS[1]
    if second not in index and (path / second).is_dir():
        raise ValueError(
            f"{setting}: {path} has a folder {second}, which its {PIPELINE_INDEX} does not name; "
            f"name it there, or give {path / FOLDERS[0]} alone"
        )
    has_second = (index.get(second) or [None, None])[1] is not None
    return _transformers(path, FOLDERS if has_second else FOLDERS[:1], setting)


def _transformers(
    path: Path, folders: Sequence[str], setting: str
) -> SafetensorsInput | ExpertsInput:
    missing = next((name for name in folders if not (path / name).is_dir()), None)
    if missing is not None:
        both = f" (needed are {' and '.join(folders)})" if len(folders) > 1 else ""
        raise ValueError(
            f"{setting}: {path} has no folder {missing}{both}; fetch it, or give the folder of one "
            "transformer"
        )
    found = [_folder(path / name, setting) for name in folders]
    return found[0] if len(found) == 1 else ExpertsInput(path, *found)


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
