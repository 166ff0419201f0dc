# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints while the run goes on.

megatron plans which rank holds which piece; the pieces are copied to host memory, and from there on
a thread of each rank writes and hashes its own. It is no process: whatever ends a rank ends its
writer, so that nothing of a killed run goes on writing into the folder of the run that follows it.
A checkpoint is written under a temporary name. The thread of the first rank waits until every rank
has left a note of what it has written, adds the manifest and gives the checkpoint its name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.frozen import frozen_checksum
from megatron_leangrpo.checkpoint.store import (
    FileRecord,
    Manifest,
    RecordedFile,
    prune,
    publish,
    record_file,
    step_folder,
    temporary_folder,
    write_manifest,
)
from megatron_leangrpo.checkpoint.stored import described_by
from megatron_leangrpo.checkpoint.training import (
    TrainingState,
    first_line,
    one_error,
    sharded_state,
)
from megatron_leangrpo.files import atomic_write, sync
from megatron_leangrpo.models.loading import CONFIG

_NOTE = ".written_{rank}.json"
_SECONDS_BETWEEN_LOOKS = 0.02
_LONGEST_MESSAGE = 1000
_FAILED, _BUSY, _DONE = -1, 0, 1


@dataclass
class _Snapshot:
    """What this rank writes: file name to torch's index and content of each piece."""

    files: dict[str, list[tuple[Any, Any]]]
    metadata: Any
    """torch's description of the whole checkpoint, on the first rank."""


class CheckpointSaver:
    """Saves the checkpoints of a run, one at a time; every rank has one."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: str | None = None
        self._temporary = folder
        self._is_divided = False
        """Whether megatron has checked that the ranks' pieces make up the whole."""

    def start(
        self,
        state: TrainingState,
        iteration: int,
        reward: float | None = None,
        afterwards: Callable[[Path], None] | None = None,
    ) -> None:
        """Copy what a run is after that many iterations and begin to write it (a collective).

        `reward` is that of an evaluation of these weights. When the checkpoint is whole, the `keep`
        newest ones and the best one stay, and `afterwards` is called with it on the first rank.
        Waits for the save before, and raises what went wrong with it.
        """
        self.finish()
        self._stop.clear()
        self._temporary = temporary = temporary_folder(self.folder, iteration)
        if platform.is_logging_rank():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        with platform.host_mode():
            sharded = sharded_state(state, loading=False)
        needed = _num_bytes(sharded)
        what = f"checkpoint {step_folder(self.folder, iteration)} cannot be written"
        with platform.host_mode(), one_error(RuntimeError, what):
            snapshot = _snapshot(sharded, temporary, check=not self._is_divided)
        self._is_divided = True
        if platform.is_logging_rank() and state.transformer_config is not None:
            text = json.dumps(dict(state.transformer_config), indent=2) + "\n"
            (temporary / CONFIG).write_text(text, encoding="utf-8")
        frozen = frozen_checksum(state.model)
        manifest = Manifest(
            iteration, reward, state.window_scores, frozen=frozen, rollbacks=state.rollbacks
        )

        def run() -> None:
            try:
                checkpoint = self._write(snapshot, manifest)
            except Exception as error:
                free = shutil.disk_usage(self.folder).free
                space = f"about {needed >> 20} MiB are needed and {free >> 20} MiB free there"
                self._error = f"{what}: {first_line(error)} ({space})"
                return
            try:
                if afterwards is not None and checkpoint is not None:
                    afterwards(checkpoint)
            except Exception as error:
                self._error = str(error) if type(error) is ValueError else first_line(error)

        self._thread = threading.Thread(target=run, daemon=True, name="checkpoint")
        self._thread.start()

    def poll(self) -> bool:
        """Whether no save is under way any more (a collective).

        ``RuntimeError`` on all ranks where the save has failed on one.
        """
        if self._thread is None:
            return True
        alive = self._thread.is_alive()
        own = _FAILED if self._error is not None else _BUSY if alive else _DONE
        worst = platform.smallest_over_ranks(own)
        if worst == _BUSY:
            return False
        self._stop.set()
        self._thread.join()
        self._thread = None
        if worst == _FAILED:
            raise RuntimeError(self._shared_error())
        return True

    def finish(self) -> None:
        """Wait until no save is under way (a collective that raises like `poll`)."""
        while not self.poll():
            self._thread.join(_SECONDS_BETWEEN_LOOKS)

    def wait(self) -> None:
        """Let this rank's writer finish where the run ends with an error; speaks with no rank."""
        if self._thread is not None:
            self._thread.join(platform.timeout_seconds())

    def _shared_error(self) -> str:
        """The message of a rank that has failed, and no half of a checkpoint (a collective)."""
        own = platform.world_size() if self._error is None else platform.rank()
        source = platform.smallest_over_ranks(own)
        if platform.is_logging_rank():
            shutil.rmtree(self._temporary, ignore_errors=True)
        raw = (self._error or "").encode()[:_LONGEST_MESSAGE]
        message = torch.zeros(_LONGEST_MESSAGE, dtype=torch.uint8)
        message[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
        message = message.to(platform.device())
        dist.broadcast(message, src=source)
        self._error = None
        return bytes(message.tolist()).rstrip(b"\0").decode("utf-8", errors="ignore")

    def _write(self, snapshot: _Snapshot, manifest: Manifest) -> Path | None:
        """Write this rank's share; on the first rank, return the checkpoint when it is whole."""
        temporary = self._temporary
        note = _write_files(temporary, snapshot, self._stop)
        atomic_write(temporary / _NOTE.format(rank=platform.rank()), json.dumps(note))
        if not platform.is_logging_rank():
            return None
        notes = [temporary / _NOTE.format(rank=rank) for rank in range(platform.world_size())]
        while not all(path.exists() for path in notes):
            if self._stop.wait(_SECONDS_BETWEEN_LOOKS):
                return None
        files = _describe(temporary, notes, snapshot.metadata)
        write_manifest(temporary, dataclasses.replace(manifest, files=files))
        sync(temporary)
        checkpoint = publish(self.folder, manifest.iteration)
        prune(self.folder, self.keep)
        return checkpoint


def _snapshot(sharded: dict[str, Any], temporary: Path, check: bool) -> _Snapshot:
    """Let megatron divide the work and copy this rank's share to host memory (a collective).

    `check` asks whether the ranks' pieces make up the whole, which does not change in a run.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    class Planned(TorchDistSaveShardedStrategy):
        """Keeps what megatron's own writer would be given."""

        def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> Any:
            self.writer, self.metadata = writer, planned[1]
            return super()._get_save_and_finalize_callbacks(writer, planned)

    # Its writer's results would go through a queue in a server process of its own, which outlives
    # a rank that is killed and keeps the run's output open.
    if getattr(filesystem_async, "_results_queue", queue) is None:
        filesystem_async._results_queue = queue.Queue()
    strategy = Planned("torch_dist", 1, thread_count=1)
    options = {"validate_access_integrity": check, "async_sharded_save": True}
    dist_checkpointing.save(sharded, str(temporary), strategy, **options)
    files = {
        name: [(item.index, data) for item, data in raw]
        + [(item.index, data.detach().to("cpu", copy=True)) for item, data in tensors]
        for _, name, (raw, tensors) in strategy.writer.write_buckets
    }
    return _Snapshot(files, strategy.metadata)


def _write_files(folder: Path, snapshot: _Snapshot, stop: threading.Event) -> dict[str, Any]:
    """Write this rank's files as torch does; returns their records and where each piece is."""
    records, places = {}, []
    for name, pieces in snapshot.files.items():
        with (folder / name).open("wb") as raw:
            file = RecordedFile(raw)
            for index, data in pieces:
                if stop.is_set():
                    break
                start = file.size
                if isinstance(data, torch.Tensor):
                    torch.save(data, file)
                else:
                    file.write(data.getbuffer())
                offset = None if index.offset is None else list(index.offset)
                places.append([index.fqn, offset, index.index, name, start, file.size - start])
            raw.flush()
            os.fsync(raw.fileno())
        records[name] = dataclasses.astuple(file.record())
    snapshot.files.clear()
    return {"files": records, "places": places}


def _describe(temporary: Path, notes: list[Path], metadata: Any) -> dict[str, FileRecord]:
    """Write torch's description of what all ranks have written; returns the records of all files"""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex

    files: dict[str, FileRecord] = {}
    places = {}
    for path in notes:
        note = json.loads(path.read_text(encoding="utf-8"))
        files |= {name: FileRecord(*record) for name, record in note["files"].items()}
        for fqn, offset, index, *place in note["places"]:
            offset = None if offset is None else torch.Size(offset)
            places[MetadataIndex(fqn, offset, index)] = _StorageInfo(*place)
        path.unlink()
    for name, content in described_by(metadata, places).items():
        (temporary / name).write_bytes(content)
    for path in sorted(temporary.iterdir()):
        if path.name not in files:
            sync(path)
            files[path.name] = record_file(path)
    return files


def _num_bytes(value: Any) -> int:
    """Bytes of the tensors that this and all other ranks write (a collective)."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    def own(value: Any) -> int:
        if isinstance(value, dict):
            return sum(own(inner) for inner in value.values())
        if isinstance(value, list):
            return sum(own(inner) for inner in value)
        if isinstance(value, ShardedTensor) and is_main_replica(value.replica_id):
            return value.data.nbytes
        return 0

    total = torch.tensor(own(value), device=platform.device())
    dist.all_reduce(total)
    return int(total)
