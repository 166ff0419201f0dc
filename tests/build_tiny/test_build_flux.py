# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import megatron_leangrpo
from megatron_leangrpo.build_tiny import text
from megatron_leangrpo.build_tiny.flux import build_tiny_flux
from megatron_leangrpo.build_tiny.muon import orthogonalize
from megatron_leangrpo.build_tiny.rendering import TASKS

ASSETS = Path(megatron_leangrpo.__file__).parent / "assets"
FEW = {"vae_steps": 3, "transformer_steps": 3, "corpus_size": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_flux(tmp_path_factory.mktemp("tiny") / "base", "digits", **FEW)


def test_built_folder_is_a_flux_pipeline_that_draws(folder):
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        "the number 7",
        height=32,
        width=64,
        num_inference_steps=2,
        max_sequence_length=8,
        output_type="pt",
    ).images
    assert images.shape == (1, 3, 32, 64)
    assert pipeline.transformer.config.guidance_embeds
    assert pipeline.scheduler.config.use_dynamic_shifting


def test_building_twice_gives_the_same_bytes(folder, tmp_path):
    again = build_tiny_flux(tmp_path / "again", "digits", **FEW)
    names = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(again) for p in again.rglob("*") if p.is_file())
    assert all((folder / name).read_bytes() == (again / name).read_bytes() for name in names)


def test_folder_in_use_is_not_overwritten(folder):
    before = (folder / "model_index.json").read_bytes()
    with pytest.raises(ValueError, match=r"--output .*: exists and is not empty"):
        build_tiny_flux(folder, "digits", **FEW)
    assert (folder / "model_index.json").read_bytes() == before


def test_unknown_task_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--task letters: unknown; valid: digits, shapes"):
        build_tiny_flux(tmp_path / "x", "letters")


@pytest.mark.parametrize("task", TASKS)
def test_embedded_base_is_complete_small_and_of_the_right_shape(task):
    from diffusers import FluxTransformer2DModel

    base = ASSETS / f"flux_{task}"
    files = [path for path in base.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3.2e6
    model = FluxTransformer2DModel.from_pretrained(base / "transformer")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(0.86e6, rel=0.01)
    for weights in base.glob("*/*.safetensors"):
        assert {t.dtype for t in load_file(weights).values()} == {torch.bfloat16}
    config = model.config
    assert (config.num_attention_heads, config.attention_head_dim) == (4, 24)
    assert tuple(config.axes_dims_rope) == (8, 8, 8) and config.guidance_embeds
    rows = [json.loads(line) for line in (base / "prompts.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == TASKS[task]().prompts


def test_tokenizers_know_the_tasks_words_whole_and_spell_the_rest():
    clip, t5 = text.make_clip_tokenizer(), text.make_t5_tokenizer()
    for word in text.WORDS:
        assert len(clip(word).input_ids) == 3 and len(t5(word).input_ids) == 2
    assert clip.tokenize("the number 42") == ["the</w>", "number</w>", "4</w>", "2</w>"]
    assert t5.tokenize("the number 42") == ["▁the", "▁number", "▁", "4", "2"]
    assert clip.unk_token_id not in clip.convert_tokens_to_ids(
        clip.tokenize("caf\u00e9 \U0001f600")
    )


@pytest.mark.parametrize("task", TASKS)
def test_prompts_fit_the_text_length_that_the_base_was_trained_with(task):
    from megatron_leangrpo.build_tiny.transformer import MAX_SEQUENCE_LENGTH

    tokens = text.make_t5_tokenizer()(TASKS[task]().prompts).input_ids
    assert max(map(len, tokens)) <= MAX_SEQUENCE_LENGTH


@pytest.mark.parametrize("task", TASKS)
def test_rendering_is_a_function_of_the_seed(task):
    tiny = TASKS[task]()
    images = tiny.render([0, 1, 2], seed=5)
    assert images.shape == (3, 3, 32, 32) and images.min() >= 0 and images.max() <= 1
    assert torch.equal(images, tiny.render([0, 1, 2], seed=5))
    assert not torch.equal(images, tiny.render([0, 1, 2], seed=6))


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_orthogonalized_matrix_has_singular_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrix))
    # The quintic iteration oscillates around 1 by design; very small values are still on their way.
    assert values.max() < 1.3 and values.min() > 0.5
