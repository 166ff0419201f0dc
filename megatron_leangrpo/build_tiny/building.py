# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What building an embedded base takes, whatever its family: progress, seeds and the folder."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from megatron_leangrpo.build_tiny.rendering import TinyTask


@contextmanager
def phase(title: str, steps: int) -> Iterator[Callable[[float], None]]:
    """A progress bar for one training phase; yields the function to call with each step's loss."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task(title, total=steps, loss=float("nan"))
        yield lambda loss: progress.update(bar, advance=1, loss=loss)


def seeded(seed: int, make: Callable[..., Any], *args: Any) -> Any:
    """Build a part with the global generator seeded, and leave that generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(*args)


def check_output(output: Path) -> None:
    """ValueError for a folder in use, so that no file of an older model stays in it."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {output}: exists and is not empty; give a new folder")


def save(pipeline: Any, task: TinyTask, readme: str, output: Path) -> None:
    """Write in bf16 beside the output and rename, so that the folder is there whole or not."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
        folder = Path(scratch) / output.name
        # Part by part; `pipeline.to` warns about modules that are not there.
        for part in pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                torch.nn.Module.to(part, torch.bfloat16)
        pipeline.save_pretrained(folder)
        rows = [{"prompt": p, **m} for p, m in zip(task.prompts, task.metadata, strict=True)]
        for name, chosen in task.prompt_files().items():
            lines = "".join(json.dumps(rows[index]) + "\n" for index in chosen)
            (folder / name).write_text(lines, encoding="utf-8")
        (folder / "README.md").write_text(readme, encoding="utf-8")
        folder.rename(output)
