# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The run directory: its files, who may write into it, and how a run continues in it."""

import fcntl
import json
import os
import re
import socket
import weakref
from pathlib import Path
from typing import IO, Any

from megatron_leangrpo.files import atomic_write

_CONFIG = "config.yaml"
_LOCK = ".lock"

_held: weakref.WeakSet[IO[str]] = weakref.WeakSet()
"""The locks of this process."""


def _let_go_in_child() -> None:
    """A forked helper would keep the lock of a run that was killed, and it could not be resumed."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go_in_child)


class RunDirectory:
    """Paths of a run, and its lock on the rank that writes.

    `create` and `resume` are for the writing rank; other ranks build `RunDirectory(path)`, which
    touches nothing. Usable as a context manager; the lock also goes when the process ends.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / _CONFIG
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.samples = self.path / "samples"
        self.curves = self.path / "curves.png"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        self.logs = self.path / "logs"
        self.summary = self.path / "summary.json"
        self._lock: IO[str] | None = None

    @classmethod
    def check(cls, output: str | os.PathLike[str] | None, resume: bool) -> None:
        """Raise what `create` or `resume` would raise, before a run has cost anything."""
        if resume:
            cls._of_earlier_run(output)
            return
        directory = cls("runs" if output is None else output)
        if output is not None:
            _refuse_occupied(directory)
        path = directory.path.absolute()
        existing = next(place for place in (path, *path.parents) if place.exists())
        if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
            raise ValueError(
                f"output: cannot create {directory.path}: {existing} is no directory that this "
                "user may write into; give another place with --output"
            )

    @classmethod
    def create(
        cls, output: str | os.PathLike[str] | None, recipe: str, parent: str = "runs"
    ) -> "RunDirectory":
        """Make the directory `output`, or a fresh `<parent>/<recipe>-<n>`, and lock it.

        ValueError when `output` holds anything that this run did not put there.
        """
        if output is None:
            name = re.sub(r"[^\w-]+", "-", recipe)[:100].strip("-") or "run"
            directory = cls(_make_numbered(Path(parent), name))
        else:
            directory = cls(output)
            if not (directory.path / _LOCK).exists():
                # Before anything is written into a directory that is not ours.
                _refuse_occupied(directory)
            try:
                directory.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"output: cannot create {output}: {error.strerror}") from error
        directory._acquire()
        try:
            _refuse_occupied(directory)
        except ValueError:
            directory.close()
            raise
        directory.samples.mkdir(exist_ok=True)
        return directory

    @classmethod
    def resume(cls, output: str | os.PathLike[str] | None) -> "RunDirectory":
        """Open and lock the directory of an earlier run; ValueError when there is none."""
        directory = cls._of_earlier_run(output)
        directory._acquire()
        directory.samples.mkdir(exist_ok=True)
        return directory

    @classmethod
    def _of_earlier_run(cls, output: str | os.PathLike[str] | None) -> "RunDirectory":
        if output is None:
            raise ValueError("checkpoint.resume needs output: the run directory to continue")
        directory = cls(output)
        if not directory.config.is_file():
            raise ValueError(
                f"output: {output} holds no run to resume (no {_CONFIG}); valid: a run directory, "
                "or checkpoint.resume=false to start a new run"
            )
        return directory

    def write_config(self, yaml: str) -> None:
        """Write the resolved configuration."""
        atomic_write(self.config, yaml)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json; a number that is not finite is an error."""
        atomic_write(self.summary, json.dumps(summary, indent=2, allow_nan=False) + "\n")

    def metrics_rows(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl that are complete."""
        if not self.metrics.exists():
            return []
        rows = []
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut off when the run was killed
            if isinstance(row, dict) and isinstance(row.get("iteration"), int):
                rows.append(row)
        return rows

    def evaluation_rewards(self) -> dict[int, float]:
        """The rewards of the evaluations in summary.json, by iteration."""
        try:
            rows = json.loads(self.summary.read_text(encoding="utf-8"))["evaluations"]
            return {
                int(row["iteration"]): float(row["reward"])
                for row in rows
                if row["reward"] is not None
            }
        except (OSError, KeyError, TypeError, ValueError):
            return {}

    def truncate_metrics(self, last_iteration: int) -> None:
        """Keep each iteration up to `last_iteration` once, so that a resumed run can append."""
        rows = {row["iteration"]: row for row in self.metrics_rows()}
        kept = [rows[n] for n in sorted(rows) if n <= last_iteration]
        atomic_write(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))

    def close(self) -> None:
        """Let other runs write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _acquire(self) -> None:
        lock = (self.path / _LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise ValueError(
                f"output: {self.path} is being written by another run ({owner}); give this run "
                "another directory"
            ) from error
        except OSError:
            # Some network file systems have no locks; a run there goes without.
            lock.close()
            return
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        self._lock = lock
        _held.add(lock)


def _refuse_occupied(directory: RunDirectory) -> None:
    path = directory.path
    if path.exists() and not path.is_dir():
        raise ValueError(f"output: {path} is a file; valid: a new or empty directory")
    names = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    others = [name for name in names if name != _LOCK]
    if not others:
        return
    if _CONFIG in others:
        raise ValueError(
            f"output: {path} already holds a run; valid: another directory, or "
            "checkpoint.resume=true to continue that run"
        )
    shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
    raise ValueError(
        f"output: {path} holds files that no run made ({shown}); valid: a new or empty directory"
    )


def _make_numbered(parent: Path, name: str) -> Path:
    """Make `<parent>/<name>-<n>` with the next free number; runs that start together differ."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        pattern = re.compile(re.escape(name) + r"-(\d+)")
        matches = (pattern.fullmatch(entry.name) for entry in parent.iterdir())
        number = max((int(match[1]) for match in matches if match), default=0)
        while True:
            number += 1
            path = parent / f"{name}-{number}"
            try:
                path.mkdir()
                return path
            except FileExistsError:
                continue
    except OSError as error:
        raise ValueError(
            f"output: cannot create a run directory in {parent.resolve()}: {error.strerror}; "
            "give another place with --output"
        ) from error
