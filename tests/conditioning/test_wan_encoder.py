# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
import shutil
from pathlib import Path

import pytest
import torch

import megatron_leangrpo
from megatron_leangrpo.conditioning import Conditioning, SyntheticTextEncoder, WanTextEncoder
from megatron_leangrpo.conditioning.wan import clean_prompt

BASE = Path(megatron_leangrpo.__file__).parent / "assets" / "wan_motion"
PROMPTS = [
    "a red circle moving left",
    "",
    "  a red\tcircle \n moving   left ",
    "a &amp;lt;red&amp;gt; circle &amp; a square",
    "caf\u00c3\u00a9 \u201cred\u201d \U0001f600",
    "moving " * 700,
]


@pytest.fixture(scope="module")
def pipeline():
    from diffusers import WanPipeline

    return WanPipeline.from_pretrained(BASE, transformer=None, vae=None, dtype=torch.float32)


@pytest.mark.parametrize("length", [8, 512])
def test_embeddings_equal_diffusers_pipeline(pipeline, length):
    ours = WanTextEncoder.from_pipeline(BASE, max_sequence_length=length).encode(PROMPTS)
    # Without gradient on both sides: attention picks another kernel otherwise.
    with torch.no_grad():
        expected, empty = pipeline.encode_prompt(PROMPTS, max_sequence_length=length)
    assert torch.equal(ours.prompt_embeds, expected)
    assert torch.equal(ours.prompt_embeds[1], empty[0])
    assert (ours.pooled, ours.guidance, ours.image_embeds, ours.image_latents) == (None,) * 4


def test_embeddings_after_the_prompt_are_zeros():
    embeds = WanTextEncoder.from_pipeline(BASE, 8).encode(PROMPTS[:1]).prompt_embeds
    # Five words and the end of the text.
    assert (embeds[0].abs().sum(-1) > 0).tolist() == [True] * 6 + [False] * 2


def test_prompts_are_cleaned_as_in_diffusers():
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    assert [clean_prompt(p) for p in PROMPTS] == [prompt_clean(p) for p in PROMPTS]
    assert clean_prompt(PROMPTS[4]).startswith("caf\u00e9")


def test_cut_prompts_are_noted(pipeline):
    encoder = WanTextEncoder.from_pipeline(BASE, max_sequence_length=8)
    notes = encoder.notes(["a red circle moving left", "red " * 9 + "up", "red " * 9 + "down"])
    assert len(notes) == 3 and all("UMT5 keeps 8 of 11 tokens" in note for note in notes[:2])
    assert "equal after the cut" in notes[2]


@pytest.mark.parametrize("length", [0, 513])
def test_lengths_that_wan_does_not_take_are_refused(length):
    with pytest.raises(ValueError, match=rf"max_text_tokens = {length}: Wan takes 1 to 512"):
        WanTextEncoder.from_pipeline(BASE, max_sequence_length=length)


def test_folder_that_is_no_pipeline_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a Wan pipeline folder, tokenizer/ is missing"):
        WanTextEncoder.from_pipeline(tmp_path)


def test_truncated_weights_are_refused_with_the_folder(tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(BASE, folder)
    weights = folder / "text_encoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model\.base: .*text_encoder cannot be loaded"):
        WanTextEncoder.from_pipeline(folder)


def test_conditioning_without_a_pooled_part_is_selected_and_moved():
    rows = Conditioning(torch.arange(6.0).view(3, 2, 1), image_latents=torch.arange(3.0))
    picked = rows.select([2, 0]).to("cpu", torch.bfloat16)
    assert picked.prompt_embeds[0].flatten().tolist() == [4, 5] and picked.pooled is None
    assert picked.image_latents.tolist() == [2, 0]
    assert picked.image_latents.dtype == torch.bfloat16
    assert SyntheticTextEncoder(4, 8, 0).encode(["p"]).pooled is None
