# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A report in one HTML file: tables, curves and pictures inside it, nothing to run or fetch."""

from __future__ import annotations

import base64
import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from torch import Tensor

from megatron_leangrpo.files import atomic_write
from megatron_leangrpo.reporting.curves import save_curves
from megatron_leangrpo.reporting.pictures import cell
from megatron_leangrpo.reporting.run_directory import RunDirectory

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #202124; margin: 2em auto; max-width: 1100px;
  padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; }
th, td { text-align: right; padding: .3em .9em; border-bottom: 1px solid #dadce0; }
th:first-child, td:first-child { text-align: left; }
th { color: #5f6368; font-weight: 600; }
.warning { border-left: 4px solid #d93025; background: #fce8e6; padding: .5em 1em; margin: .5em 0; }
.fine { border-left: 4px solid #188038; background: #e6f4ea; padding: .5em 1em; }
.pictures td { vertical-align: top; text-align: center; font-size: .85em; color: #5f6368; }
.pictures td:first-child { text-align: left; max-width: 16em; overflow-wrap: anywhere; }
.pictures img { display: block; margin: auto; }
.right { color: #188038; } .wrong { color: #d93025; }
.curves { max-width: 100%; }
"""


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A sample and how it scored."""

    image: Tensor
    reward: float | None = None
    correct: bool | None = None


def write_report(
    path: Path,
    title: str,
    facts: Sequence[str],
    warnings: Sequence[str],
    tables: Sequence[Table],
    curves: Sequence[Path],
    models: Sequence[str],
    rows: Sequence[tuple[str, Sequence[Picture]]],
) -> None:
    """Write the page; `curves` are run directories, `rows` prompts with each model's picture."""
    found = "".join(f'<p class="warning">{escape(text)}</p>' for text in warnings)
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(text)}</p>" for text in facts),
        found or '<p class="fine">No sign of reward hacking.</p>' * (len(models) > 1),
        *map(_table, tables),
        *map(_curves, curves),
        "<h2>The same prompts and noise</h2>",
        _pictures(models, rows),
    ]
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title><style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )
    atomic_write(path, page)


def _table(table: Table) -> str:
    rows = "".join(_row("td", row) for row in table.rows)
    return (
        f"<h2>{escape(table.title)}</h2>\n<table><thead>{_row('th', table.columns)}</thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(text)}</{tag}>' for text in cells)}</tr>\n"


def _curves(run: Path) -> str:
    """The curves of a run, drawn from its metrics."""
    directory = RunDirectory(run)
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "curves.png"
        rewards = directory.evaluation_rewards()
        save_curves(picture, directory.metrics_rows(), rewards, run.name)
        data = picture.read_bytes()
    return f'<h2>{escape(run.name)}</h2>\n<img class="curves" alt="curves" src="{_inline(data)}">'


def _pictures(models: Sequence[str], rows: Sequence[tuple[str, Sequence[Picture]]]) -> str:
    lines = [
        f"<tr><td>{escape(prompt)}</td>{''.join(map(_picture, pictures))}</tr>\n"
        for prompt, pictures in rows
    ]
    head = _row("th", ["prompt", *models])
    return f'<table class="pictures"><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table>'


def _picture(picture: Picture) -> str:
    image = cell(picture.image)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    score = "" if picture.reward is None else f"{picture.reward:.3f}"
    if picture.correct is not None:
        score = f'<span class="{"right" if picture.correct else "wrong"}">{score}</span>'
    size = f'width="{image.width}" height="{image.height}"'
    return f'<td><img alt="" {size} src="{_inline(buffer.getvalue())}">{score}</td>'


def _inline(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
