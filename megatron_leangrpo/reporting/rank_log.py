# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The log of one rank in the run directory: an event a line, as JSON."""

import contextlib
import json
import logging
import math
import os
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class RankLog(logging.Handler):
    """Writes `rank_<n>.jsonl`; a resumed run appends. A context manager.

    While it is entered, warnings of Python and of libraries on this rank are written, too, besides
    going where they would go without it. A log that cannot be written ends no run.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(logging.WARNING)
        self.path, self.rank = folder / f"rank_{rank:05}.jsonl", rank
        self._host, self._iteration = socket.gethostname(), 0
        self._file: int | None = None

    def write(self, event: str, message: str = "", **data: Any) -> None:
        """Append an event with the time, the iteration and whatever else is known of it."""
        self._iteration = data.pop("iteration", self._iteration)
        row = {
            "time": round(time.time(), 3),
            "rank": self.rank,
            "host": self._host,
            "iteration": self._iteration,
            "event": event,
            **({"message": message} if message else {}),
            **{name: _plain(value) for name, value in data.items()},
        }
        if self._file is not None:
            # A full disk has nobody here to tell; the checkpoint will.
            with contextlib.suppress(OSError):
                os.write(self._file, (json.dumps(row, default=str) + "\n").encode())

    def emit(self, record: logging.LogRecord) -> None:
        """Write what a library has logged."""
        self.write(record.levelname.lower(), record.getMessage(), source=record.name)

    def __enter__(self) -> "RankLog":
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._entered = contextlib.ExitStack()
        self._entered.enter_context(self._hearing_loggers())
        self._entered.enter_context(self._hearing_warnings())
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @contextlib.contextmanager
    def _hearing_loggers(self) -> Iterator[None]:
        root = logging.getLogger()
        # Where nobody listens Python prints warnings itself; with this handler it would not.
        added = (
            [self] if root.handlers or logging.lastResort is None else [logging.lastResort, self]
        )
        for handler in added:
            root.addHandler(handler)
        try:
            yield
        finally:
            for handler in added:
                root.removeHandler(handler)

    @contextlib.contextmanager
    def _hearing_warnings(self) -> Iterator[None]:
        show = warnings.showwarning

        def show_and_write(message: Any, category: type, filename: str, line: int, *more: Any):
            self.write("warning", str(message), source=f"{filename}:{line}")
            show(message, category, filename, line, *more)

        warnings.showwarning = show_and_write
        try:
            yield
        finally:
            if warnings.showwarning is show_and_write:
                warnings.showwarning = show


def _plain(value: Any) -> Any:
    """Valid JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
