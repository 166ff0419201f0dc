# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Runs `leangrpo` in the process of a test; see the fixture of that name."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_leangrpo import cli, platform


class Outcome(NamedTuple):
    """How a command has ended."""

    status: int | None
    out: str
    err: str


class CommandLine:
    """`leangrpo(*arguments)` and `leangrpo.refuses(parts, *arguments)` in the current directory."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._handlers = {number: signal.getsignal(number) for number in numbers}

    def __call__(self, *arguments: str) -> Outcome:
        """Run a command to its end."""
        self._capture.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments)
        platform.destroy_distributed()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        return Outcome(exit_.value.code, *self._capture.readouterr())

    def refuses(self, parts: list[str], *arguments: str) -> None:
        """Assert one line on stderr with all parts, exit status 2, and the directory as it was."""
        before = files(Path())
        outcome = self(*arguments)
        assert outcome.status == 2, outcome
        assert outcome.err.startswith("leangrpo: error: "), outcome.err
        assert outcome.err.count("\n") == 1, outcome.err
        missing = [part for part in parts if part not in outcome.err]
        assert not missing, (missing, outcome.err)
        assert files(Path()) == before


def files(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, files with their content."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }
