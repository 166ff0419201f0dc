# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Embeddings of prompts in files, so that text encoders are loaded only for what is new.

A file is named by what its content depends on: the bytes of tokenizers and encoders, their
settings, and the prompt. Another prompt, encoder, dtype or length is another file.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.conditioning.encoders import ENCODE_BATCH, Conditioning, TextEncoder
from megatron_leangrpo.files import atomic_path, atomic_write

SETTING = "prompts.embedding_cache"
_FORMAT = 1
_BLOCK = 1 << 22


class CachedEncoder:
    """A text encoder that reads what it has encoded before, in this run or in another one."""

    def __init__(self, folder: Path, identity: str, load: Callable[[], TextEncoder]) -> None:
        self.folder = folder / identity[:16]
        self._identity, self._load = identity, load
        self._encoder: TextEncoder | None = None
        self.summary = ""
        """What `prepare` has found, in a line."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{SETTING} = {folder} cannot be made: {error.strerror}") from error

    def prepare(self, prompts: Sequence[str], noted: Sequence[str] = ()) -> None:
        """Encode what is missing and let go of the encoders (a collective).

        The ranks share the work. `noted` are the prompts of which `notes` will be asked.
        """
        missing, total = self._missing(prompts), len(set(prompts))
        self.summary = f"embeddings: {len(missing)} of {total} prompts are new in {self.folder}"
        # Everyone has looked before anyone writes.
        _barrier()
        self._encode(missing[platform.rank() :: platform.world_size()])
        _barrier()
        # What another machine has encoded is not here if they share no files.
        self._encode(self._missing(prompts))
        if platform.is_logging_rank():
            self.notes(noted)
        self._encoder = None
        gc.collect()
        if not platform.is_host():
            torch.cuda.empty_cache()
        _barrier()

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """One row per prompt, on the CPU."""
        self._encode(self._missing(prompts))
        rows = {prompt: self._read(prompt) for prompt in dict.fromkeys(prompts)}
        first = rows[prompts[0]]
        return Conditioning(**{n: torch.stack([rows[p][n] for p in prompts]) for n in first})

    def notes(self, prompts: Sequence[str]) -> list[str]:
        """As the encoder's own; those of prompts that are cut are kept in a file."""
        self._encode(self._missing(prompts))
        cut = [p for p in dict.fromkeys(prompts) if self._metadata(p)["cut"] == "yes"]
        if not cut:
            return []
        path = self.folder / f"notes-{_digest(self._identity, *cut)[:40]}.json"
        if not path.exists():
            atomic_write(path, json.dumps(self._loaded().notes(cut)))
        return json.loads(path.read_text(encoding="utf-8"))

    def _path(self, prompt: str) -> Path:
        return self.folder / f"{_digest(self._identity, prompt)[:40]}.safetensors"

    def _missing(self, prompts: Sequence[str]) -> list[str]:
        return [prompt for prompt in dict.fromkeys(prompts) if not self._path(prompt).exists()]

    def _loaded(self) -> TextEncoder:
        if self._encoder is None:
            self._encoder = self._load()
        return self._encoder

    def _encode(self, prompts: Sequence[str]) -> None:
        for start in range(0, len(prompts), ENCODE_BATCH):
            batch = prompts[start : start + ENCODE_BATCH]
            encoded = self._loaded().encode(batch).to("cpu")
            columns = {
                field.name: getattr(encoded, field.name)
                for field in dataclasses.fields(encoded)
                if getattr(encoded, field.name) is not None
            }
            if start == 0:
                row = sum(column[0].nbytes for column in columns.values())
                self._check_space(row * len(prompts))
            for index, prompt in enumerate(batch):
                self._write(prompt, {name: c[index].clone() for name, c in columns.items()})

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise ValueError(
                f"{SETTING}: about {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are "
                f"free in {self.folder}"
            )

    def _write(self, prompt: str, row: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        is_cut = bool(self._loaded().notes([prompt]))
        metadata = {"sha256": _checksum(row), "cut": "yes" if is_cut else "no"}
        with atomic_path(self._path(prompt)) as temporary:
            save_file(row, temporary, metadata)

    def _metadata(self, prompt: str) -> dict[str, str]:
        with self._open(prompt) as file:
            return file.metadata()

    def _read(self, prompt: str) -> dict[str, torch.Tensor]:
        with self._open(prompt) as file:
            row = {name: file.get_tensor(name) for name in sorted(file.keys())}
            expected = file.metadata()["sha256"]
        if _checksum(row) != expected:
            raise self._damaged(prompt, "its content is not what was written")
        return row

    def _open(self, prompt: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self._path(prompt), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise self._damaged(prompt, error) from error

    def _damaged(self, prompt: str, why: object) -> ValueError:
        return ValueError(f"{SETTING}: {self._path(prompt)}: {why}; remove it and start again")


def encoder_identity(folder: Path, cache: Path, **settings: Any) -> str:
    """A digest of a pipeline's tokenizers and text encoders and of how they are used.

    Files are hashed as a whole, once: the cache remembers a file by path, size and time of change.
    """
    memory = cache / "files.json"
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    parts = sorted(p for kind in ("tokenizer*", "text_encoder*") for p in folder.glob(kind))
    found: dict[str, str] = {}
    for path in sorted(p for part in parts for p in part.rglob("*") if p.is_file()):
        status = path.stat()
        key = f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}"
        known[key] = known.get(key) or _hash_file(path)
        found[str(path.relative_to(folder))] = known[key]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        atomic_write(memory, json.dumps(known, indent=1))
    except OSError as error:
        raise ValueError(f"{SETTING} = {cache} cannot be written: {error.strerror}") from error
    about = {"format": _FORMAT, "files": found, "transformers": version("transformers"), **settings}
    return _digest(json.dumps(about, sort_keys=True))


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _checksum(row: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(row):
        digest.update(row[name].contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def _digest(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
