# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The folder of a run's checkpoints: which are whole, which is newest, and which may go.

A checkpoint is written under a temporary name and renamed when it is whole. Its `manifest.json`
says what is in it and holds size and SHA-256 of every file, so that what happened to it since is
noticed before it is loaded. Names are compared by their number.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from megatron_leangrpo.files import atomic_write, sync

FORMAT = 2
MANIFEST = "manifest.json"
_STEP = re.compile(r"step_(\d+)")
_BLOCK = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself."""

    iteration: int
    """Finished iterations."""
    reward: float | None = None
    """Evaluation reward of these weights, where there was an evaluation."""
    window_scores: list[list[float]] = field(default_factory=list)
    """First step, length and score of jagg's windows."""
    files: dict[str, FileRecord] = field(default_factory=dict)
    frozen: str | None = None
    """Checksum of the weights below trained adapters, which are not in the checkpoint."""
    rollbacks: int = 0
    """How often the run had gone back to its best checkpoint."""


def step_folder(folder: Path, iteration: int) -> Path:
    """Where the checkpoint after that many iterations is."""
    return folder / f"step_{iteration:06d}"


def temporary_folder(folder: Path, iteration: int) -> Path:
    """Where it is while it is written."""
    return folder / f".step_{iteration:06d}.tmp"


def record_file(path: Path) -> FileRecord:
    """Read a file and return its record."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


class RecordedFile:
    """A file that knows its size and checksum when it has been written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self.size = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        """Append bytes."""
        self._digest.update(data)
        self.size += memoryview(data).nbytes
        return self._file.write(data)

    def flush(self) -> None:
        """`torch.save` asks for it."""
        self._file.flush()

    def record(self) -> FileRecord:
        """Size and checksum of what has been written."""
        return FileRecord(self.size, self._digest.hexdigest())


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write the manifest; the last file of a checkpoint."""
    content = {"format": FORMAT, **asdict(manifest)}
    content["checksum"] = _checksum(content)
    atomic_write(checkpoint / MANIFEST, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _checksum(content: dict[str, Any]) -> str:
    own = {key: value for key, value in content.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest; ``ValueError`` where it is missing, broken or of a newer version."""
    try:
        content = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        version = int(content["format"])
        if version > FORMAT:
            raise ValueError(f"format {version} is newer than this version reads ({FORMAT})")
        if content["checksum"] != _checksum(content):
            raise ValueError("its content is not what was written")
        reward = content["reward"]
        return Manifest(
            iteration=int(content["iteration"]),
            reward=None if reward is None else float(reward),
            window_scores=[[int(a), int(n), float(s)] for a, n, s in content["window_scores"]],
            files={
                str(name): FileRecord(int(record["num_bytes"]), str(record["sha256"]))
                for name, record in content["files"].items()
            },
            frozen=content.get("frozen"),
            rollbacks=int(content.get("rollbacks", 0)),
        )
    except (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = error if type(error) is ValueError else f"{type(error).__name__} {error}"
        raise ValueError(f"checkpoint {checkpoint}: no readable {MANIFEST}: {reason}") from error


def damage(checkpoint: Path) -> str | None:
    """Say what is wrong with a checkpoint, or None."""
    try:
        files = read_manifest(checkpoint).files
    except ValueError as error:
        return manifest_damage(error)
    found = (file_damage(checkpoint / name, files[name]) for name in sorted(files))
    return next((wrong for wrong in found if wrong is not None), None)


def manifest_damage(error: ValueError) -> str:
    """What `read_manifest` complains about, without the checkpoint's name."""
    return str(error).partition(": ")[2]


def file_damage(path: Path, expected: FileRecord) -> str | None:
    """Say how a file differs from its record, or None."""
    try:
        size = path.stat().st_size
        if size != expected.num_bytes:
            return f"{path.name} has {size} bytes instead of {expected.num_bytes}"
        if record_file(path) != expected:
            return f"the content of {path.name} is not what was written"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """All folders with a step's name and their numbers, newest first; whole or not."""
    return sorted(_step_folders(folder), reverse=True)


def _step_folders(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match:
            yield int(match[1]), path


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that is whole, and why newer ones were passed over."""

    checkpoint: Path | None
    skipped: list[str]


def newest_valid(folder: Path) -> Found:
    """Look for the newest checkpoint whose files are all as they were written."""
    return first_whole([path for _, path in checkpoints(folder)], damage)


def first_whole(paths: Iterable[Path], damage_of: Callable[[Path], str | None]) -> Found:
    """The first of some checkpoints of which `damage_of` finds nothing."""
    skipped = []
    for path in paths:
        wrong = damage_of(path)
        if wrong is None:
            return Found(path, skipped)
        skipped.append(f"{path.name}: {wrong}")
    return Found(None, skipped)


def publish(folder: Path, iteration: int) -> Path:
    """Give a finished checkpoint its name. What has the name already is no checkpoint; it stays."""
    final, temporary = step_folder(folder, iteration), temporary_folder(folder, iteration)
    if final.exists() or final.is_symlink():
        number = 1
        while (aside := final.with_name(f"{final.name}.invalid-{number}")).exists():
            number += 1
        final.rename(aside)
    temporary.rename(final)
    sync(folder)
    return final


def best_first(folder: Path) -> list[int]:
    """The numbers of the checkpoints that were evaluated; of equally good ones the newest first."""
    found = [(reward, number) for number, _, reward in _rewards(folder) if reward is not None]
    return [number for _, number in sorted(found, reverse=True)]


def _rewards(folder: Path) -> list[tuple[int, Path, float | None]]:
    """The checkpoints with a readable manifest, newest first, and their evaluation rewards."""
    rewards = []
    for number, path in checkpoints(folder):
        try:
            rewards.append((number, path, read_manifest(path).reward))
        except ValueError:
            continue
    return rewards


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the `keep` newest checkpoints and the one with the best evaluation.

    Folders without a manifest are not ours to remove. Call it when the newest one is whole.
    """
    rewards = _rewards(folder)
    best = best_first(folder)[:1]
    removed = [path for number, path, _ in rewards[keep:] if number not in best]
    for path in removed:
        # Under this name a half-removed checkpoint is none.
        doomed = path.with_name(f".{path.name}.old")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)
    return removed
