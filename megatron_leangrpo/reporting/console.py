# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a person sees of a run: progress bars on a terminal, plain lines in a file or pipe."""

import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

_PLAIN_PROGRESS_SECONDS = 30.0


class _Terminal(RichConsole):
    """Keeps the cursor visible: a rank that is killed could not bring it back."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class Console:
    """Prints on one rank (`enabled`) and is silent on the others.

    Text is never wrapped or interpreted as markup, so that a prompt with brackets prints as it is
    and a line in a log file is one line. A character that stdout cannot encode prints escaped.
    """

    def __init__(self, enabled: bool = True, output: RichConsole | None = None) -> None:
        self._enabled = enabled
        if output is None:
            _never_fail_on_characters()
            output = _Terminal(highlight=False, markup=False)
        self._out = output
        self._progress: Progress | None = None
        self._said: set[str] = set()
        self._record: Callable[..., None] | None = None
        self._early: list[tuple[str, str, dict[str, Any]]] = []
        self._last_line = time.monotonic()

    def line(self, text: str | Text = "") -> None:
        """Print one line."""
        if self._enabled:
            self._last_line = time.monotonic()
            self._out.print(text, soft_wrap=True)

    def warning(self, text: str) -> None:
        """Print a warning, once however often it is given."""
        if text not in self._said:
            self._said.add(text)
            self.record("warning", text)
            self.line(Text.assemble(("warning: ", "bold yellow"), text))

    def record(self, event: str, text: str = "", **data: Any) -> None:
        """Add an event to this rank's log, whether the rank prints or not."""
        if self._record is None:
            self._early.append((event, text, data))
        else:
            self._record(event, text, **data)

    def record_to(self, write: Callable[..., None] | None) -> None:
        """Where events go from now on, with those so far; None keeps them."""
        self._record = write
        if write is not None:
            early, self._early = self._early, []
            for event, text, data in early:
                write(event, text, **data)

    def facts(self, title: str, rows: Mapping[str, Any]) -> None:
        """Print what a run consists of, one name and value a line."""
        width = max((len(name) for name in rows), default=0)
        self.line(Text(title, style="bold"))
        for name, value in rows.items():
            self.line(Text.assemble((f"  {name:{width}}  ", "dim"), str(value)))

    def table(self, columns: list[str], rows: list[list[str]], title: str | None = None) -> None:
        """Print a table; the first column is text, the others are numbers."""
        if not self._enabled:
            return
        if not self._out.is_terminal:
            _plain_table(self.line, columns, rows, title)
            return
        table = Table(title=title, title_justify="left", title_style="bold")
        for index, name in enumerate(columns):
            table.add_column(name, justify="right" if index else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self._out.print(table)

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show progress of a phase; call what is yielded with the number of finished items.

        Phases nest. In a pipe a phase prints a line only after half a minute of silence.
        """
        if not self._enabled:
            yield lambda count=1: None
        elif self._out.is_terminal:
            with self._bar(description, total) as advance:
                yield advance
        else:
            yield _PlainProgress(self, description, total)

    @contextmanager
    def _bar(self, description: str, total: int) -> Iterator[Callable[[int], None]]:
        outermost = self._progress is None
        if outermost:
            self._progress = _new_progress(self._out)
            self._progress.start()
        progress = self._progress
        assert progress is not None
        task: TaskID = progress.add_task(description, total=total)
        try:
            yield lambda count=1: progress.advance(task, count)
        finally:
            progress.remove_task(task)
            if outermost:
                progress.stop()
                self._progress = None

    def silence_seconds(self) -> float:
        """Seconds since the last line."""
        return time.monotonic() - self._last_line


class _PlainProgress:
    def __init__(self, console: Console, description: str, total: int) -> None:
        self._console, self._description, self._total = console, description, total
        self._done = 0

    def __call__(self, count: int = 1) -> None:
        self._done += count
        if self._console.silence_seconds() > _PLAIN_PROGRESS_SECONDS:
            self._console.line(f"{self._description}: {self._done}/{self._total}")


def _never_fail_on_characters() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _new_progress(console: RichConsole) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        refresh_per_second=8,
    )


def _plain_table(
    line: Callable[[str], None], columns: list[str], rows: list[list[str]], title: str | None
) -> None:
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    if title:
        line(title)
    for row in [columns, *rows]:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ]
        line("  ".join(cells).rstrip())
