# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Builds an embedded base, whatever its family: parts, two training phases, and the folder."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_leangrpo.build_tiny import flow_matching, vae
from megatron_leangrpo.build_tiny.rendering import TinyTask


class Corpus(Protocol):
    """What a transformer is trained on: normalised latents [n, ...], and the prompt of each."""

    latents: Tensor
    prompt_index: Tensor
    velocity: flow_matching.Velocity


@dataclass(frozen=True)
class TinyFamily:
    """What the bases of a family are made of."""

    tasks: dict[str, Callable[[], TinyTask]]
    make_pipeline: Callable[[int], Any]
    """Of a seed: the diffusers pipeline with untrained parts."""
    make_corpus: Callable[[Any, TinyTask, int, int], Corpus]
    """Of (pipeline, task, size, seed): encoded once; sets the VAE's normalisation."""
    vae_batch: int
    batch: int
    readme: str
    """With the places {task} and {prompt}."""


def build(
    family: TinyFamily,
    output: str | Path,
    task: str,
    seed: int,
    vae_steps: int | None,
    transformer_steps: int | None,
    corpus_size: int,
) -> Path:
    """Train and save a pipeline folder in bf16; given step counts replace the task's."""
    if task not in family.tasks:
        raise ValueError(f"--task {task}: unknown; valid: {', '.join(family.tasks)}")
    output = Path(output)
    check_output(output)
    tiny = family.tasks[task]()
    vae_steps = tiny.vae_steps if vae_steps is None else vae_steps
    transformer_steps = tiny.transformer_steps if transformer_steps is None else transformer_steps
    pipeline = family.make_pipeline(seed)
    with phase("autoencoder", vae_steps) as on_step:
        vae.train_vae(pipeline.vae, tiny, vae_steps, seed, on_step, family.vae_batch)
    corpus = family.make_corpus(pipeline, tiny, corpus_size, seed)
    with phase("transformer", transformer_steps) as on_step:
        trained = flow_matching.train(
            pipeline.transformer,
            corpus.velocity,
            corpus.latents,
            corpus.prompt_index,
            transformer_steps,
            family.batch,
            seed,
            on_step,
        )
    pipeline.register_modules(transformer=trained)
    save(pipeline, tiny, family.readme.format(task=tiny.name, prompt=tiny.prompts[-1]), output)
    return output


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
