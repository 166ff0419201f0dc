# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""`leangrpo build-tiny flux`: makes the embedded FluxPipeline folders from nothing."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from megatron_leangrpo.build_tiny.rendering import TASKS, TinyTask
from megatron_leangrpo.codecs.packing import pack_latents

CORPUS_SIZE = 8192
README = """# Tiny FLUX base: {task}

A diffusers `FluxPipeline` with tiny parts, pre-trained on rendered {task}, made by
`leangrpo build-tiny flux --task {task}`. Licence: Apache-2.0.

    pipe = FluxPipeline.from_pretrained(folder)
    pipe("{prompt}", height=32, width=32, num_inference_steps=8, guidance_scale=3.5,
         max_sequence_length=8)

The transformer has only seen guidance 3.5 and 8 text tokens. Prompts: `prompts.jsonl`.
"""


@contextmanager
def _phase(title: str, steps: int) -> Iterator[Callable[[float], None]]:
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


def build_tiny_flux(
    output: str | Path,
    task: str = "digits",
    seed: int = 0,
    vae_steps: int | None = None,
    flux_steps: int | None = None,
    corpus_size: int = CORPUS_SIZE,
) -> Path:
    """Train and save a tiny FluxPipeline folder in bf16; given step counts replace the task's.

    The folder must not exist or be empty, so that no file of an older model stays in it.
    """
    from megatron_leangrpo.build_tiny import text, transformer, vae

    if task not in TASKS:
        raise ValueError(f"--task {task}: unknown; valid are {', '.join(TASKS)}")
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {output}: exists and is not empty; give a new folder")
    tiny = TASKS[task]()
    vae_steps = tiny.vae_steps if vae_steps is None else vae_steps
    flux_steps = tiny.flux_steps if flux_steps is None else flux_steps
    tokenizer, tokenizer_2 = text.make_clip_tokenizer(), text.make_t5_tokenizer()
    clip = _seeded(seed, text.make_clip_encoder, tokenizer)
    t5 = _seeded(seed, text.make_t5_encoder, tokenizer_2)
    codec = _seeded(seed, vae.make_vae)
    model = _seeded(seed, transformer.make_transformer, text.TEXT_DIM)
    with _phase("autoencoder", vae_steps) as on_step:
        vae.train_vae(codec, tiny, vae_steps, seed, on_step)
    pipeline = _assemble(codec, clip, tokenizer, t5, tokenizer_2, model)
    corpus = _make_corpus(pipeline, tiny, corpus_size, seed)
    with _phase("transformer", flux_steps) as on_step:
        pipeline.register_modules(
            transformer=transformer.train_transformer(model, corpus, flux_steps, seed, on_step)
        )
    _save(pipeline, tiny, output)
    return output


def _seeded(seed: int, make: Callable[..., Any], *args: Any) -> Any:
    """Build a part with the global generator seeded, and leave that generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(*args)


def _assemble(codec: Any, clip: Any, tokenizer: Any, t5: Any, tokenizer_2: Any, model: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    # The scheduler configuration of FLUX.1-dev.
    scheduler = FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    return FluxPipeline(scheduler, codec, clip, tokenizer, t5, tokenizer_2, model)


@torch.no_grad()
def _make_corpus(pipeline: Any, task: TinyTask, size: int, seed: int) -> Any:
    """Encode all training pictures once and set the VAE's normalisation from them."""
    from megatron_leangrpo.build_tiny import transformer, vae

    indices = [n % len(task.prompts) for n in range(size)]
    images = task.render(indices, seed=seed + 1_000_003)
    latents = vae.encode_images(pipeline.vae, images)
    shift, scale = float(latents.mean()), 1 / float(latents.std())
    pipeline.vae.register_to_config(scaling_factor=scale, shift_factor=shift)
    prompt_embeds, pooled, _ = pipeline.encode_prompt(
        task.prompts, max_sequence_length=transformer.MAX_SEQUENCE_LENGTH
    )
    return transformer.Corpus(
        latents=pack_latents((latents - shift) * scale),
        prompt_index=torch.tensor(indices),
        prompt_embeds=prompt_embeds,
        pooled=pooled,
    )


def _save(pipeline: Any, task: TinyTask, output: Path) -> None:
    """Write beside the output and rename, so that the folder is there whole or not at all."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
        folder = Path(scratch) / output.name
        _cast(pipeline, torch.bfloat16).save_pretrained(folder)
        rows = [{"prompt": p, **m} for p, m in zip(task.prompts, task.metadata, strict=True)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "prompts.jsonl").write_text(lines, encoding="utf-8")
        readme = README.format(task=task.name, prompt=task.prompts[-1])
        (folder / "README.md").write_text(readme, encoding="utf-8")
        folder.rename(output)


def _cast(pipeline: Any, dtype: torch.dtype) -> Any:
    """Cast the parts one by one; `pipeline.to` warns about modules that are not there."""
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            torch.nn.Module.to(part, dtype)
    return pipeline
