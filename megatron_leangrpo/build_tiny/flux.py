# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""`leangrpo build-tiny flux`: makes the embedded FluxPipeline folders from nothing."""

from pathlib import Path
from typing import Any

import torch

from megatron_leangrpo.build_tiny import text, transformer, vae
from megatron_leangrpo.build_tiny.building import TinyFamily, build, seeded
from megatron_leangrpo.build_tiny.rendering import TASKS, TinyTask
from megatron_leangrpo.build_tiny.transformer import Corpus
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


def build_tiny_flux(
    output: str | Path,
    task: str = "digits",
    seed: int = 0,
    vae_steps: int | None = None,
    transformer_steps: int | None = None,
    corpus_size: int = CORPUS_SIZE,
) -> Path:
    """Train and save a tiny FluxPipeline folder in bf16; given step counts replace the task's.

    The folder must not exist or be empty.
    """
    family = TinyFamily(TASKS, _make_pipeline, _make_corpus, vae.BATCH, transformer.BATCH, README)
    return build(family, output, task, seed, vae_steps, transformer_steps, corpus_size)


def _make_pipeline(seed: int) -> Any:
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
    tokenizer, tokenizer_2 = text.make_clip_tokenizer(), text.make_t5_tokenizer()
    clip = seeded(seed, text.make_clip_encoder, tokenizer)
    t5 = seeded(seed, text.make_t5_encoder, tokenizer_2)
    codec = seeded(seed, vae.make_vae)
    model = seeded(seed, transformer.make_transformer, text.TEXT_DIM)
    return FluxPipeline(scheduler, codec, clip, tokenizer, t5, tokenizer_2, model)


@torch.no_grad()
def _make_corpus(pipeline: Any, task: TinyTask, size: int, seed: int) -> Corpus:
    """Encode all training pictures once and set the VAE's normalisation from them."""
    indices = [n % len(task.prompts) for n in range(size)]
    images = task.render(indices, seed=seed + 1_000_003)
    latents = vae.encode(pipeline.vae, images)
    shift, scale = float(latents.mean()), 1 / float(latents.std())
    pipeline.vae.register_to_config(scaling_factor=scale, shift_factor=shift)
    prompt_embeds, pooled, _ = pipeline.encode_prompt(
        task.prompts, max_sequence_length=transformer.MAX_SEQUENCE_LENGTH
    )
    return Corpus(
        latents=pack_latents((latents - shift) * scale),
        prompt_index=torch.tensor(indices),
        prompt_embeds=prompt_embeds,
        pooled=pooled,
    )
