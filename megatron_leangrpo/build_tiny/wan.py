# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""`leangrpo build-tiny wan`: makes the embedded WanPipeline folder from nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_leangrpo.build_tiny import text, vae
from megatron_leangrpo.build_tiny.building import TinyFamily, build, seeded
from megatron_leangrpo.build_tiny.rendering import TinyTask, motion_task

CORPUS_SIZE = 3072
MAX_SEQUENCE_LENGTH = 8
VAE_BATCH = 4
BATCH = 32
LATENT_CHANNELS = 4
# Share of samples whose prompt is empty, so that classifier-free guidance has its other branch.
EMPTY_PROMPTS = 0.1
README = """# Tiny Wan base: {task}

A diffusers `WanPipeline` with tiny parts, pre-trained on rendered clips of a moving circle, made by
`leangrpo build-tiny wan`. Licence: Apache-2.0.

    pipe = WanPipeline.from_pretrained(folder)
    pipe("{prompt}", height=32, width=32, num_frames=9, num_inference_steps=8,
         guidance_scale=1.0, max_sequence_length=8)

The transformer has only seen 9 frames of 32 x 32 and 8 text tokens. Prompts: `prompts.jsonl` to
train on, `held_out.jsonl` to evaluate with.
"""


def build_tiny_wan(
    output: str | Path,
    task: str = "motion",
    seed: int = 0,
    vae_steps: int | None = None,
    transformer_steps: int | None = None,
    corpus_size: int = CORPUS_SIZE,
) -> Path:
    """Train and save a tiny WanPipeline folder in bf16; given step counts replace the task's.

    The folder must not exist or be empty.
    """
    family = TinyFamily(
        {"motion": motion_task}, _make_pipeline, make_corpus, VAE_BATCH, BATCH, README
    )
    return build(family, output, task, seed, vae_steps, transformer_steps, corpus_size)


def _make_pipeline(seed: int) -> Any:
    from diffusers import UniPCMultistepScheduler, WanPipeline

    # The scheduler configuration of Wan 2.1, but for the shift: these clips are tiny.
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=1.0,
    )
    tokenizer = text.make_t5_tokenizer(text.MOTION_WORDS)
    encoder = seeded(seed, text.make_umt5_encoder, tokenizer)
    codec = seeded(seed, make_vae)
    model = seeded(seed, make_transformer, text.TEXT_DIM)
    return WanPipeline(tokenizer, encoder, codec, scheduler, model)


def make_vae() -> Any:
    """0.46 M parameters: sides / 4, frames 1 + 4k to 1 + k, 4 channels."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        scale_factor_spatial=4,
        scale_factor_temporal=4,
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )


def make_transformer(text_dim: int) -> Any:
    """0.8 M parameters: 4 blocks, 4 heads of 24, the sinusoid as wide as Wan's."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=24,
        ffn_dim=256,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=text_dim,
    )


@dataclass(frozen=True)
class Corpus:
    """Normalised latents [n, c, frames, h, w] and the prompt of each; the last prompt is empty."""

    latents: Tensor
    prompt_index: Tensor
    prompt_embeds: Tensor

    def velocity(self, model: Any, latents: Tensor, time: Tensor, prompts: Tensor) -> Tensor:
        """The velocity for prompts by index."""
        return model(
            hidden_states=latents,
            timestep=1000 * time,
            encoder_hidden_states=self.prompt_embeds[prompts],
            return_dict=False,
        )[0]


@torch.no_grad()
def make_corpus(pipeline: Any, task: TinyTask, size: int, seed: int) -> Corpus:
    """Encode all training clips once and set the VAE's normalisation from them."""
    indices = torch.arange(size) % len(task.prompts)
    parts = [
        vae.encode(pipeline.vae, task.render(chunk.tolist(), seed=seed + 1_000_003 + number))
        for number, chunk in enumerate(indices.split(256))
    ]
    latents = torch.cat(parts)
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    pipeline.vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    prompt_embeds, _ = pipeline.encode_prompt(
        [*task.prompts, ""],
        do_classifier_free_guidance=False,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
    )
    without = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < EMPTY_PROMPTS
    return Corpus(
        latents=(latents - mean.view(-1, 1, 1, 1)) / std.view(-1, 1, 1, 1),
        prompt_index=torch.where(without, len(task.prompts), indices),
        prompt_embeds=prompt_embeds,
    )
