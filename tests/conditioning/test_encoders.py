# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from megatron_leangrpo.conditioning import Conditioning, FluxTextEncoder, SyntheticTextEncoder

WORDS = " ".join(f"word{n % 97}" for n in range(700))


@pytest.fixture(scope="module")
def pipeline(base_folder):
    from diffusers import FluxPipeline

    return FluxPipeline.from_pretrained(
        base_folder, transformer=None, vae=None, dtype=torch.float32
    )


@pytest.mark.parametrize("length", [8, 512])
def test_embeddings_equal_diffusers_pipeline(base_folder, pipeline, length):
    prompts = [
        "the number 7",
        "a red circle",
        "",
        f"{WORDS} end",
        "The Number 7",
        "caf\u00e9 \U0001f600",
    ]
    encoder = FluxTextEncoder.from_pipeline(base_folder, max_sequence_length=length)
    ours = encoder.encode(prompts)
    # Without gradient on both sides: attention picks another kernel otherwise.
    with torch.no_grad():
        embeds, pooled, _ = pipeline.encode_prompt(prompts, max_sequence_length=length)
    assert torch.equal(ours.prompt_embeds, embeds)
    assert torch.equal(ours.pooled, pooled)
    assert ours.guidance is None


def test_rows_do_not_depend_on_the_batch(base_folder):
    prompts = [f"the number {n}" for n in range(40)]
    encoder = FluxTextEncoder.from_pipeline(base_folder, max_sequence_length=8)
    together, alone = encoder.encode(prompts), encoder.encode(prompts[37:38])
    # Matrix products of other batch sizes may add in another order.
    torch.testing.assert_close(together.select([37]).prompt_embeds, alone.prompt_embeds)
    torch.testing.assert_close(together.select([37]).pooled, alone.pooled)


def test_cut_prompts_are_noted_once_with_counts_and_equal_ones_named(base_folder, caplog):
    encoder = FluxTextEncoder.from_pipeline(base_folder, max_sequence_length=512)
    prompts = [f"{WORDS} and a circle", f"{WORDS} and a square", "x" * 5000, "the number 7"]
    encoded = encoder.encode(prompts)
    notes = encoder.notes([*prompts, *prompts])
    assert len(notes) == 4
    assert all("CLIP keeps 77 of" in note and "T5 keeps 512 of" in note for note in notes[:3])
    assert "5002 tokens" in notes[2]
    assert "equal after the cut" in notes[3]
    assert "circle" in notes[3] and "square" in notes[3] and "xxx" not in notes[3]
    assert all("\n" not in note and len(note) < 250 for note in notes)
    assert torch.equal(encoded.prompt_embeds[0], encoded.prompt_embeds[1])
    assert not caplog.records


def test_setting_is_the_limit_in_the_note(base_folder):
    encoder = FluxTextEncoder.from_pipeline(base_folder, max_sequence_length=8)
    (note,) = encoder.notes(['a sign that says "OPEN"'])
    assert "T5 keeps 8 of" in note and "CLIP" not in note


def test_folder_that_is_no_pipeline_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a FLUX pipeline folder, tokenizer/ is missing"):
        FluxTextEncoder.from_pipeline(tmp_path)


def test_truncated_weights_are_refused_with_the_folder(base_folder, tmp_path):
    import shutil

    folder = tmp_path / "base"
    shutil.copytree(base_folder, folder)
    weights = folder / "text_encoder_2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model\.base: .*text_encoder_2 cannot be loaded"):
        FluxTextEncoder.from_pipeline(folder)


@pytest.mark.parametrize("length", [0, -3])
def test_length_below_one_is_refused(base_folder, length):
    with pytest.raises(ValueError, match=f"max_sequence_length={length}: must be at least 1"):
        FluxTextEncoder.from_pipeline(base_folder, max_sequence_length=length)


def test_conditioning_selects_and_repeats_rows():
    rows = Conditioning(torch.arange(6.0).view(3, 2, 1), torch.arange(3.0)[:, None])
    picked = rows.with_guidance(3.5).select([2, 0, 2])
    assert picked.pooled.flatten().tolist() == [2, 0, 2]
    assert picked.prompt_embeds[0].flatten().tolist() == [4, 5]
    assert picked.guidance.tolist() == [3.5] * 3
    half = picked.to("cpu", torch.bfloat16)
    assert half.pooled.dtype == torch.bfloat16 and half.guidance.dtype == torch.float32


def test_synthetic_embeddings_depend_on_the_text_alone():
    encoder = SyntheticTextEncoder(prompt_length=5, dim=6, pooled_dim=7)
    both, one = encoder.encode(["a", "b"]), encoder.encode(["b"])
    assert both.prompt_embeds.shape == (2, 5, 6) and both.pooled.shape == (2, 7)
    assert torch.equal(both.prompt_embeds[1], one.prompt_embeds[0])
    assert not torch.equal(both.pooled[0], both.pooled[1])
    assert encoder.notes(["a b"]) == []
