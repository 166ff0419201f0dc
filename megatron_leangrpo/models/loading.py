# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Reads and writes diffusers transformer folders: JSON and safetensors, nothing unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_leangrpo.files import atomic_path, atomic_write

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
FLUX_CLASS = "FluxTransformer2DModel"
WRAPPER_PREFIXES = ("_orig_mod.", "module.")
GUIDANCE_TENSORS = "time_text_embed.guidance_embedder."


def read_transformer_config(folder: str | Path, class_name: str = FLUX_CLASS) -> dict[str, Any]:
    """The `config.json` of a transformer folder; ValueError if it is no `class_name`."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ValueError(
            f"model.base: {path} does not exist; needed is a diffusers transformer folder with "
            f"{CONFIG} and {WEIGHTS}"
        )
    config = _read_json(path)
    found = config.get("_class_name")
    if found != class_name:
        raise ValueError(f"model.base: {path} describes a {found}; this model needs a {class_name}")
    return config


def load_transformer_folder(
    folder: str | Path, class_name: str = FLUX_CLASS
) -> tuple[dict[str, Any], WeightFiles]:
    """The configuration and the weights of a folder; a tensor is read when it is asked for.

    Raises ValueError for whatever can be seen to be wrong without reading a tensor: no such folder,
    a missing, truncated or ambiguous file, another class, guidance in one place and not the other.
    """
    config = read_transformer_config(folder, class_name)
    weights = WeightFiles(Path(folder))
    has_guidance = any(name.startswith(GUIDANCE_TENSORS) for name in weights)
    wants_guidance = bool(config.get("guidance_embeds", False))
    if class_name == FLUX_CLASS and has_guidance != wants_guidance:
        verb = "holds" if has_guidance else "holds no"
        consequence = "dropped" if has_guidance else "random"
        raise ValueError(
            f"model.base: {Path(folder) / CONFIG} says guidance_embeds is "
            f"{str(wants_guidance).lower()}, but the weight file {verb} {GUIDANCE_TENSORS}* "
            f"tensors; they would be {consequence}. Set guidance_embeds to "
            f"{str(has_guidance).lower()} or use the weights that belong to this configuration"
        )
    return config, weights


def save_transformer_folder(
    folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write a folder that diffusers' `from_pretrained` reads; one process only.

    Each file is replaced when its successor is whole; shards of an older save are removed.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / WEIGHTS) as temporary:
        save_file(dict(tensors), temporary, metadata={"format": "pt"})
    atomic_write(folder / CONFIG, json.dumps(dict(config), indent=2) + "\n")
    stem = WEIGHTS.removesuffix(".safetensors")
    for stale in (folder / INDEX, *folder.glob(f"{stem}-*-of-*.safetensors")):
        stale.unlink(missing_ok=True)


class WeightFiles(Mapping[str, "torch.Tensor"]):
    """The tensors of a folder by name, on the CPU; files are memory-mapped and read on demand."""

    def __init__(self, folder: Path) -> None:
        self._handles: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        single, index = folder / WEIGHTS, folder / INDEX
        if single.is_file() and index.is_file():
            raise ValueError(
                f"model.base: {folder} holds both {WEIGHTS} and {INDEX}; remove the one that is "
                "left over from an older save"
            )
        if index.is_file():
            self._open_shards(index)
        elif single.is_file():
            self._file_of = dict.fromkeys(self._open(single).keys(), single)
        else:
            raise ValueError(f"model.base: {folder} holds neither {WEIGHTS} nor {INDEX}")
        self._prefix = ""
        while prefix := self._common_wrapper():
            self._prefix += prefix

    def _common_wrapper(self) -> str:
        """The prefix that saving a compiled or data-parallel module puts before every name."""
        first = next(iter(self._file_of), "").removeprefix(self._prefix)
        prefix = next((p for p in WRAPPER_PREFIXES if first.startswith(p)), "")
        is_common = all(name.startswith(self._prefix + prefix) for name in self._file_of)
        return prefix if is_common else ""

    def _open_shards(self, index: Path) -> None:
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"model.base: {index} has no weight_map")
        for name, file in weight_map.items():
            path = index.parent / file
            if path not in self._handles and not path.is_file():
                raise ValueError(f"model.base: {path} does not exist, but {index.name} names it")
            if name not in self._open(path).keys():  # noqa: SIM118 (a handle is no container)
                raise ValueError(f"model.base: {path} holds no tensor {name}, as {index.name} says")
            self._file_of[name] = path

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            from safetensors import SafetensorError, safe_open

            try:
                self._handles[path] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"model.base: {path} is truncated or no safetensors file ({error}); "
                    "fetch or write it again"
                ) from error
        return self._handles[path]

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self._prefix + name
        return self._handles[self._file_of[stored]].get_tensor(stored)

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"model.base: {path} is no readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"model.base: {path} holds no JSON object")
    return content
