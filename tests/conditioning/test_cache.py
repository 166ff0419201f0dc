# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A prompt is encoded once; whatever its embedding depends on makes it another one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_leangrpo import platform
from megatron_leangrpo.conditioning import Conditioning, FluxTextEncoder, cache
from megatron_leangrpo.conditioning.cache import CachedEncoder, encoder_identity
from megatron_leangrpo.config import ModelConfig, PromptConfig, RunConfig
from megatron_leangrpo.grpo.architecture import resolve_architecture
from megatron_leangrpo.grpo.inputs import build_encoder

PROMPTS = ["The Number 7", "the number 7", "a/b/c ../d", "y" * 300, ""]


class Counting:
    """Says what it encodes; every row is its prompt's length."""

    def __init__(self) -> None:
        self.loads, self.encoded = 0, []

    def load(self) -> Counting:
        self.loads += 1
        return self

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        self.encoded += prompts
        rows = torch.tensor([[float(len(prompt))] * 3 for prompt in prompts])
        return Conditioning(rows[:, None].expand(-1, 2, -1).bfloat16(), rows)

    def notes(self, prompts: Sequence[str]) -> list[str]:
        return [f"{p[:5]} is cut" for p in dict.fromkeys(prompts) if len(p) > 100]


@pytest.fixture
def counting() -> Counting:
    return Counting()


def cached(folder: Path, encoder: Counting, identity: str = "a" * 64) -> CachedEncoder:
    return CachedEncoder(folder, identity, encoder.load)


def test_a_second_run_encodes_nothing_and_does_not_load_the_encoders(tmp_path, counting):
    first = cached(tmp_path, counting)
    first.prepare([*PROMPTS, *PROMPTS], noted=PROMPTS)
    assert counting.loads == 1 and sorted(counting.encoded) == sorted(PROMPTS)
    second = cached(tmp_path, counting)
    second.prepare(PROMPTS, noted=PROMPTS)
    assert second.notes(PROMPTS) == ["yyyyy is cut"]
    assert second.notes(PROMPTS[:2]) == []
    embeddings = second.encode([PROMPTS[3], PROMPTS[0], PROMPTS[3]])
    assert embeddings.pooled[:, 0].tolist() == [300.0, 12.0, 300.0]
    assert embeddings.prompt_embeds.shape == (3, 2, 3)
    assert embeddings.prompt_embeds.dtype == torch.bfloat16 and embeddings.guidance is None
    assert counting.loads == 1
    assert second.summary.startswith("embeddings: 0 of 5 prompts are new in ")


def test_encoders_are_freed_when_everything_is_encoded(tmp_path, counting):
    import weakref

    made: list[weakref.ref[Counting]] = []

    def load() -> Counting:
        encoder = Counting()
        made.append(weakref.ref(encoder))
        return encoder

    encoder = CachedEncoder(tmp_path, "a" * 64, load)
    encoder.prepare(PROMPTS, noted=PROMPTS)
    assert len(made) == 1 and made[0]() is None
    # What comes up later is encoded when it does.
    assert encoder.encode(["something new"]).pooled[0, 0] == 13
    assert len(made) == 2


def test_file_names_are_short_and_do_not_tell_or_mix_prompts(tmp_path, counting):
    cached(tmp_path / "cache", counting).prepare(PROMPTS)
    names = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(names) == len(PROMPTS) == len({name.lower() for name in names})
    assert all(len(name) < 60 and "umber" not in name for name in names)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_file_is_named(tmp_path, counting, damage):
    encoder = cached(tmp_path, counting)
    encoder.prepare(PROMPTS)
    path = encoder._path(PROMPTS[0])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content if damage == "flipped" else content[:-4])
    with pytest.raises(ValueError, match=r"prompts\.embedding_cache: .*safetensors.*remove it"):
        encoder.encode(PROMPTS)


def test_a_full_disk_is_told_before_it_is_full(tmp_path, counting, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"prompts\.embedding_cache: about .* GB are needed"):
        cached(tmp_path, counting).prepare(PROMPTS)


def prepare_on_a_rank(folder: str) -> tuple[list[str], list[float]]:
    counting = Counting()
    encoder = cached(Path(folder), counting)
    encoder.prepare(PROMPTS)
    return counting.encoded, encoder.encode(PROMPTS).pooled[:, 0].tolist()


def test_ranks_share_the_work_and_the_files(run_ranks, tmp_path):
    results = run_ranks(2, prepare_on_a_rank, str(tmp_path))
    assert sorted(p for encoded, _ in results for p in encoded) == sorted(PROMPTS)
    assert all(encoded for encoded, _ in results)
    assert results[0][1] == results[1][1] == [float(len(p)) for p in PROMPTS]


def real(base: Path, folder: Path, dtype: str = "float32", length: int = 8) -> CachedEncoder:
    config = RunConfig(
        model=ModelConfig(base=str(base), dtype=dtype, max_text_tokens=length),
        prompts=PromptConfig(embedding_cache=str(folder)),
    )
    return build_encoder(config, resolve_architecture(config))


def test_the_embeddings_are_those_of_the_encoder_bit_for_bit(base_folder, tmp_path):
    encoder = real(base_folder, tmp_path)
    encoder.prepare(PROMPTS)
    plain = FluxTextEncoder.from_pipeline(base_folder, max_sequence_length=8).encode(PROMPTS)
    with mock.patch.object(FluxTextEncoder, "from_pipeline", side_effect=AssertionError):
        again = real(base_folder, tmp_path)
        again.prepare(PROMPTS)
        found = again.encode(PROMPTS)
    assert torch.equal(found.prompt_embeds, plain.prompt_embeds)
    assert torch.equal(found.pooled, plain.pooled)


def test_another_prompt_encoder_dtype_or_length_misses(base_folder, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(base_folder, base)
    folder = tmp_path / "cache"

    def files() -> int:
        return len(list(folder.glob("*/*.safetensors")))

    real(base, folder).encode(PROMPTS)
    assert files() == len(PROMPTS)
    real(base, folder).encode([*PROMPTS, "another"])
    assert files() == len(PROMPTS) + 1
    for changed in (
        real(base, folder, dtype="bfloat16"),
        real(base, folder, length=9),
        _with_another_weight(base, folder),
        _with_another_tokenizer(base, folder),
    ):
        before = files()
        changed.encode(["another"])
        assert files() == before + 1


def _with_another_weight(base: Path, folder: Path) -> CachedEncoder:
    """One number of one tensor; the file's size stays."""
    path = base / "text_encoder_2" / "model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, path, {"format": "pt"})
    return real(base, folder)


def _with_another_tokenizer(base: Path, folder: Path) -> CachedEncoder:
    path = base / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "another": 1}))
    return real(base, folder)


def test_a_moved_base_hits_and_its_files_are_hashed_once(base_folder, tmp_path):
    first = encoder_identity(base_folder, tmp_path)
    shutil.copytree(base_folder, tmp_path / "moved")
    assert encoder_identity(tmp_path / "moved", tmp_path) == first
    with mock.patch.object(cache, "_hash_file", side_effect=AssertionError):
        assert encoder_identity(tmp_path / "moved", tmp_path) == first
    platform.destroy_distributed()
