# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Reads diffusers transformer folders: JSON and safetensors, nothing unpickled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_leangrpo.models.common.conversion import Renamed, TensorInfo, TensorSource

CONFIG = "config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
PIPELINE_INDEX = "model_index.json"
FLUX_CLASS = "FluxTransformer2DModel"
WRAPPER_PREFIXES = ("_orig_mod.", "module.")
GUIDANCE_TENSORS = "time_text_embed.guidance_embedder."

# What the published files of Wan 2.1 I2V hold and the model does not use; diffusers drops it, too.
_UNUSED = {"WanTransformer3DModel": re.compile(r"blocks\.\d+\.attn2\.norm_added_q\.weight")}

# safetensors' names of dtypes.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_transformer_config(
    folder: str | Path, class_name: str = FLUX_CLASS, setting: str = "model.base"
) -> dict[str, Any]:
    """The `config.json` of a transformer folder; ValueError if it is no `class_name`."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ValueError(
            f"{setting}: {path} does not exist; needed is a diffusers transformer folder with "
            f"{CONFIG} and {WEIGHTS}"
        )
    config = read_json(path, setting)
    found = config.get("_class_name")
    if found != class_name:
        raise ValueError(f"{setting}: {path} describes a {found}; this model needs a {class_name}")
    return config


def load_transformer_folder(
    folder: str | Path, class_name: str = FLUX_CLASS
) -> tuple[dict[str, Any], TensorSource]:
    """The configuration and the weights of a folder; a tensor is read when it is asked for.

    Tensors that published files hold and no model uses are left out.
    Raises ValueError for whatever can be seen to be wrong without reading a tensor: no such folder,
    a missing, truncated or ambiguous file, another class, guidance in one place and not the other.
    """
    config = read_transformer_config(folder, class_name)
    weights, _ = without_unused(WeightFiles(Path(folder)), class_name)
    check_guidance(config, weights, Path(folder) / CONFIG)
    return config, weights


def without_unused(tensors: TensorSource, class_name: str) -> tuple[TensorSource, list[str]]:
    """The tensors of a model, and the names of those in its published files that it never uses."""
    pattern = _UNUSED.get(class_name)
    unused = [name for name in tensors if pattern is not None and pattern.fullmatch(name)]
    if not unused:
        return tensors, []
    return Renamed(tensors, {name: name for name in tensors if name not in unused}), unused


def check_guidance(
    config: Mapping[str, Any], names: Iterable[str], path: Path, setting: str = "model.base"
) -> None:
    """Raise ValueError where a FLUX has guidance in `config.json` alone, or in the file alone."""
    has_guidance = any(name.startswith(GUIDANCE_TENSORS) for name in names)
    wants_guidance = bool(config.get("guidance_embeds", False))
    if config.get("_class_name") == FLUX_CLASS and has_guidance != wants_guidance:
        verb = "holds" if has_guidance else "holds no"
        consequence = "dropped" if has_guidance else "random"
        raise ValueError(
            f"{setting}: {path} says guidance_embeds is "
            f"{str(wants_guidance).lower()}, but the weight file {verb} {GUIDANCE_TENSORS}* "
            f"tensors; they would be {consequence}. Set guidance_embeds to "
            f"{str(has_guidance).lower()} or use the weights that belong to this configuration"
        )


class WeightFiles(TensorSource):
    """The tensors of a folder or a file by name; files are read on demand and none stays mapped."""

    def __init__(
        self,
        path: Path,
        setting: str = "model.base",
        wrappers: Sequence[str] = WRAPPER_PREFIXES,
    ) -> None:
        self._setting, self._wrappers = setting, wrappers
        self._file_of: dict[str, Path] = {}
        self._infos: dict[str, TensorInfo] = {}
        if path.is_file():
            self._add_single(path) if path.suffix == ".safetensors" else self._add_shards(path)
        else:
            self._add_folder(path)
        self._prefix = ""
        while prefix := self._common_wrapper():
            self._prefix += prefix
        self._layout = {n.removeprefix(self._prefix): i for n, i in self._infos.items()}

    def _add_folder(self, folder: Path) -> None:
        single, index = folder / WEIGHTS, folder / INDEX
        if single.is_file() and index.is_file():
            raise ValueError(
                f"{self._setting}: {folder} holds both {WEIGHTS} and {INDEX}; remove the one that "
                "is left over from an older save"
            )
        if index.is_file():
            self._add_shards(index)
        elif single.is_file():
            self._add_single(single)
        else:
            raise ValueError(f"{self._setting}: {folder} holds neither {WEIGHTS} nor {INDEX}")

    def _common_wrapper(self) -> str:
        """The prefix that saving a compiled or data-parallel module puts before every name."""
        first = next(iter(self._file_of), "").removeprefix(self._prefix)
        prefix = next((p for p in self._wrappers if first.startswith(p)), "")
        is_common = all(name.startswith(self._prefix + prefix) for name in self._file_of)
        return prefix if is_common else ""

    def _add_single(self, path: Path) -> None:
        self._infos = self._read_header(path)
        self._file_of = dict.fromkeys(self._infos, path)

    def _add_shards(self, index: Path) -> None:
        weight_map = read_json(index, self._setting).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{self._setting}: {index} has no weight_map")
        headers: dict[Path, dict[str, TensorInfo]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{self._setting}: {index} names {file!r}, which is no file name")
            path = index.parent / file
            if path not in headers:
                if not path.is_file():
                    raise ValueError(
                        f"{self._setting}: {path} does not exist, but {index.name} names it"
                    )
                headers[path] = self._read_header(path)
            if name not in headers[path]:
                raise ValueError(
                    f"{self._setting}: {path} holds no tensor {name}, as {index.name} says"
                )
            self._file_of[name], self._infos[name] = path, headers[path][name]

    def _read_header(self, path: Path) -> dict[str, TensorInfo]:
        from safetensors import SafetensorError, safe_open

        infos = {}
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (a handle is no container)
                    tensor = file.get_slice(name)
                    dtype = tensor.get_dtype()
                    if dtype not in _DTYPES:
                        raise ValueError(
                            f"{self._setting}: {path}: tensor {name} has dtype {dtype}; convert "
                            "the file to BF16, F16 or F32"
                        )
                    infos[name] = TensorInfo(tuple(tensor.get_shape()), _DTYPES[dtype])
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{self._setting}: {path} is truncated or no safetensors file ({error}); "
                "fetch or write it again"
            ) from error
        return infos

    @property
    def layout(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        return self._layout

    def __getitem__(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        stored = self._prefix + name
        # A file that stays open stays mapped, and what was read of it counts as this process's.
        with safe_open(self._file_of[stored], framework="pt", device="cpu") as file:
            return file.get_tensor(stored)


def read_json(path: Path, setting: str = "model.base") -> dict[str, Any]:
    """The JSON object in a file; ValueError names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{setting}: {path} is no readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{setting}: {path} holds no JSON object")
    return content
