# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import megatron_leangrpo
from megatron_leangrpo.build_tiny import text
from megatron_leangrpo.build_tiny.rendering import motion_task
from megatron_leangrpo.build_tiny.wan import MAX_SEQUENCE_LENGTH, build_tiny_wan
from megatron_leangrpo.codecs import WanVaeCodec
from megatron_leangrpo.codecs.packing import pack_video_latents, unpack_video_latents
from megatron_leangrpo.conditioning import WanTextEncoder
from megatron_leangrpo.rewards.color_motion import ColorMotionReward

BASE = Path(megatron_leangrpo.__file__).parent / "assets" / "wan_motion"
SIGMAS = torch.linspace(1, 0, 9)
HELD_OUT = [
    "a red circle moving right",
    "a green circle moving left",
    "a blue circle moving down",
    "a yellow circle moving up",
]


def pipeline_of(folder):
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_built_folder_is_a_wan_pipeline_that_makes_videos(tmp_path):
    folder = build_tiny_wan(tmp_path / "base", vae_steps=2, transformer_steps=2, corpus_size=20)
    pipeline = pipeline_of(folder)
    videos = pipeline(
        "a red circle moving left",
        height=32,
        width=32,
        num_frames=5,
        num_inference_steps=2,
        guidance_scale=2.0,
        max_sequence_length=8,
        output_type="pt",
    ).frames
    assert videos.shape == (1, 5, 3, 32, 32)
    assert type(pipeline.text_encoder).__name__ == "UMT5EncoderModel"
    assert all(std > 0 for std in pipeline.vae.config.latents_std)


def test_folder_in_use_and_unknown_task_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--output .*: exists and is not empty"):
        build_tiny_wan(tmp_path)
    with pytest.raises(ValueError, match="--task digits: unknown; valid: motion"):
        build_tiny_wan(tmp_path / "x", task="digits")


def test_embedded_base_is_complete_small_and_of_the_right_shape():
    from diffusers import AutoencoderKLWan, WanTransformer3DModel

    files = [path for path in BASE.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3.2e6
    for weights in BASE.glob("*/*.safetensors"):
        # What diffusers itself keeps in float32 is stored so.
        assert {t.dtype for t in load_file(weights).values()} <= {torch.bfloat16, torch.float32}
    model = WanTransformer3DModel.from_pretrained(BASE / "transformer")
    config = model.config
    assert (config.num_layers, config.num_attention_heads, config.attention_head_dim) == (4, 4, 24)
    vae = AutoencoderKLWan.from_pretrained(BASE / "vae").config
    assert (vae.scale_factor_temporal, vae.scale_factor_spatial, vae.z_dim) == (4, 4, 4)
    assert len(vae.latents_mean) == len(vae.latents_std) == 4


def test_prompt_files_split_all_prompts():
    files = {
        name: [json.loads(line) for line in (BASE / name).read_text().splitlines()]
        for name in ("prompts.jsonl", "held_out.jsonl")
    }
    assert [row["prompt"] for row in files["held_out.jsonl"]] == HELD_OUT
    rows = files["prompts.jsonl"] + files["held_out.jsonl"]
    assert sorted(row["prompt"] for row in rows) == sorted(motion_task().prompts)
    for row in rows:
        assert row["prompt"] == f"a {row['color']} circle moving {row['direction']}"


def test_prompts_fit_the_text_length_that_the_base_was_trained_with():
    tokens = text.make_t5_tokenizer(text.MOTION_WORDS)(motion_task().prompts).input_ids
    assert max(map(len, tokens)) <= MAX_SEQUENCE_LENGTH


@torch.no_grad()
def test_embedded_base_samples_the_videos_of_diffusers_pipeline():
    """Our encoder, Euler steps and codec around diffusers' transformer against WanPipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipeline = pipeline_of(BASE)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    # The scheduler's own sigmas end at 1/1000.
    sigmas = SIGMAS[:-1].tolist()
    set_timesteps = pipeline.scheduler.set_timesteps
    pipeline.scheduler.set_timesteps = lambda steps, device=None: set_timesteps(
        sigmas=sigmas, device=device
    )
    noise = torch.randn(4, 4, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    expected = pipeline(
        HELD_OUT,
        height=32,
        width=32,
        num_frames=9,
        num_inference_steps=8,
        guidance_scale=1.0,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        latents=noise,
        output_type="pt",
    ).frames

    embeds = WanTextEncoder.from_pipeline(BASE, MAX_SEQUENCE_LENGTH).encode(HELD_OUT).prompt_embeds
    tokens = pack_video_latents(noise)
    for current, following in itertools.pairwise(SIGMAS):
        velocity = pipeline.transformer(
            unpack_video_latents(tokens, 4, 4), (1000 * current).expand(4), embeds
        ).sample
        tokens = tokens + (following - current) * pack_video_latents(velocity)
    videos = WanVaeCodec.from_pipeline(BASE).decode(tokens, 32, 32)
    # Timesteps are multiples of 125, so that nothing is rounded but sums of float32.
    torch.testing.assert_close(videos, expected, atol=2e-4, rtol=0)


@torch.no_grad()
def test_embedded_base_is_half_trained():
    """Good enough to learn from, and with room to rise."""
    pipeline, task = pipeline_of(BASE), motion_task()
    prompts = task.prompts * 4
    noise = torch.randn(64, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    embeds = WanTextEncoder.from_pipeline(BASE, MAX_SEQUENCE_LENGTH).encode(prompts).prompt_embeds
    for current, following in itertools.pairwise(SIGMAS):
        velocity = pipeline.transformer(noise, (1000 * current).expand(64), embeds).sample
        noise = noise + (following - current) * velocity
    videos = WanVaeCodec.from_pipeline(BASE).decode(pack_video_latents(noise), 32, 32)
    scores = ColorMotionReward()(videos, prompts, [{}] * 64)
    assert 0.4 < scores.correct.float().mean() < 0.8
