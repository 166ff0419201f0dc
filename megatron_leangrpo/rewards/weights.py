# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Reward models from local folders: checked when a run starts, loaded when they first score."""

import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron_leangrpo import platform
from megatron_leangrpo.rewards.base import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Shapes = Mapping[str, tuple[int, ...]]
# Buffers that older versions of transformers wrote into checkpoints.
NOT_WEIGHTS = ("position_ids",)
VOCABULARIES = {"CLIPTokenizer": "vocab.json", "BertTokenizer": "vocab.txt"}


def find_device(setting: str, value: str) -> torch.device:
    """The device of a setting; auto is the policy's."""
    if value == "auto":
        return platform.device()
    try:
        device = torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"{setting} = {value!r} must be auto, cpu, cuda or cuda:N") from error
    count = torch.cuda.device_count()
    if device.type != "cpu" and not (device.type == "cuda" and (device.index or 0) < count):
        raise ValueError(f"{setting} = {value!r}: there are {count} CUDA devices; valid: auto, cpu")
    return device


def weights_folder(reward: str, settings: ModelSettings, *files: str) -> Path:
    """The folder of a reward's weights, which has the named files; ValueError otherwise."""
    if reward not in settings.paths:
        raise ValueError(
            f"reward {reward!r} needs weights and reward.paths.{reward} is not set; give the "
            f"folder that holds {', '.join(files)}"
        )
    folder = Path(settings.paths[reward]).expanduser()
    if not folder.is_dir():
        raise ValueError(f"reward {reward!r}: reward.paths.{reward} = {str(folder)!r} is no folder")
    for name in files:
        if not (folder / name).is_file():
            raise ValueError(f"reward {reward!r}: there is no {name} in {str(folder)!r}")
    return folder


def read_config(reward: str, folder: Path, name: str = "config.json") -> dict:
    """A JSON object of the folder."""
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"reward {reward!r}: {folder / name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"reward {reward!r}: {folder / name} is no JSON object")
    return content


def find_file(reward: str, folder: Path, *names: str) -> Path:
    """The first of the named files that the folder has; ValueError if it has none."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"reward {reward!r}: there is no {' or '.join(names)} in {str(folder)!r}")


def open_tensors(reward: str, file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors or torch file, mapped and not read; no code of it is run."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"reward {reward!r}: {file} cannot be read: {line}") from error
    if not isinstance(tensors, dict):
        raise ValueError(f"reward {reward!r}: {file} holds no named tensors")
    return {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def stored_shapes(reward: str, file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a file's tensors; of safetensors only the header is read."""
    from safetensors import SafetensorError, safe_open

    if file.suffix != ".safetensors":
        return {name: tuple(t.shape) for name, t in open_tensors(reward, file).items()}
    try:
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"reward {reward!r}: {file} cannot be read: {error}") from error


def check_shapes(reward: str, file: Path, stored: Shapes, wanted: Shapes) -> None:
    """Raise ValueError unless every tensor that a model needs is stored in its shape."""
    for name, shape in wanted.items():
        if name.endswith(NOT_WEIGHTS):
            continue
        if name not in stored:
            raise ValueError(f"reward {reward!r}: {file} has no tensor {name}")
        if tuple(stored[name]) != tuple(shape):
            raise ValueError(
                f"reward {reward!r}: {file} has {name} of shape {tuple(stored[name])}, its model "
                f"needs {tuple(shape)}"
            )


def wanted_shapes(build: Callable[[], nn.Module]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's state, without the memory for it."""
    with torch.device("meta"):
        model = build()
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def load_tokenizer(reward: str, folder: Path, kind: str) -> "PreTrainedTokenizerBase":
    """The folder's tokenizer, of a class of transformers; no network is asked."""
    import transformers

    # Without a vocabulary transformers would make one up.
    find_file(reward, folder, "tokenizer.json", VOCABULARIES[kind])
    try:
        return getattr(transformers, kind).from_pretrained(folder, local_files_only=True)
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"reward {reward!r}: no {kind} in {str(folder)!r}: {line}") from error


def score_head(width: int) -> nn.Sequential:
    """The linear layers 'layers.N' of the aesthetic predictor and of ImageReward.

    Their published names count dropouts too, which do nothing here.
    """
    layers = [
        nn.Linear(width, 1024),
        nn.Identity(),
        nn.Linear(1024, 128),
        nn.Identity(),
        nn.Linear(128, 64),
        nn.Identity(),
        nn.Linear(64, 16),
        nn.Linear(16, 1),
    ]
    return nn.Sequential(*layers)


class LazyModel:
    """A frozen float32 model that is loaded on first use and may wait in host memory."""

    def __init__(self, load: Callable[[], nn.Module], settings: ModelSettings) -> None:
        self._load, self._settings = load, settings
        self._model: nn.Module | None = None

    @contextmanager
    def on_device(self) -> Iterator[tuple[nn.Module, torch.device]]:
        """The model on its device, without gradients, for as long as it scores."""
        device = torch.device(self._settings.device)
        if self._model is None:
            self._model = self._load().float().eval().requires_grad_(False)
        self._model.to(device)
        try:
            with torch.no_grad():
                yield self._model, device
        finally:
            if self._settings.offload:
                self._model.to("cpu")
