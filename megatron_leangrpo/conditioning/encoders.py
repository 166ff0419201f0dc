# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Frozen text encoders: prompts in, the transformer's conditioning out."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_leangrpo.conditioning.cuts import describe_cuts
from megatron_leangrpo.conditioning.loading import (
    check_parts_exist,
    check_tokenizer,
    load_encoder,
    load_part,
)

ENCODE_BATCH = 32


@dataclass(frozen=True)
class Conditioning:
    """What a transformer is conditioned on, row by row; a family leaves None what it lacks."""

    prompt_embeds: Tensor
    """[b, s, joint_attention_dim]"""
    pooled: Tensor | None = None
    """[b, pooled_projection_dim] (FLUX)"""
    guidance: Tensor | None = None
    """[b], not multiplied by 1000; None for models without a guidance embedding."""
    image_embeds: Tensor | None = None
    """[b, 257, image_dim] of the first frame (Wan 2.1 image-to-video)"""
    image_latents: Tensor | None = None
    """[b, tokens, channels] beside the video's own (Wan image-to-video)"""

    def select(self, indices: Sequence[int] | Tensor) -> "Conditioning":
        """The given rows, in the given order; rows may repeat."""
        rows = torch.as_tensor(indices, device=self.prompt_embeds.device)
        return self._map(lambda _, tensor: tensor[rows])

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Conditioning":
        """Move everything; the guidance stays in float32, as in diffusers' pipelines."""
        return self._map(
            lambda name, tensor: tensor.to(device, None if name == "guidance" else dtype)
        )

    def with_guidance(self, scale: float) -> "Conditioning":
        """The same with one guidance scale for all rows."""
        rows = self.prompt_embeds
        guidance = torch.full((len(rows),), scale, device=rows.device)
        return dataclasses.replace(self, guidance=guidance)

    def _map(self, change: Callable[[str, Tensor], Tensor]) -> "Conditioning":
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return Conditioning(**{n: None if t is None else change(n, t) for n, t in fields})


class TextEncoder(Protocol):
    """Turns prompts into conditioning without gradient."""

    def encode(self, prompts: Sequence[str]) -> Conditioning: ...

    def notes(self, prompts: Sequence[str]) -> list[str]: ...


class FluxTextEncoder:
    """CLIP (pooled) and T5 (sequence) of a FLUX pipeline, equal to FluxPipeline.encode_prompt."""

    def __init__(
        self, tokenizer: Any, clip: Any, tokenizer_2: Any, t5: Any, max_sequence_length: int = 512
    ) -> None:
        if max_sequence_length < 1:
            raise ValueError(f"max_sequence_length={max_sequence_length}: must be at least 1")
        self._parts = {"CLIP": (tokenizer, clip), "T5": (tokenizer_2, t5)}
        self._limits = {"CLIP": tokenizer.model_max_length, "T5": max_sequence_length}

    @classmethod
    def from_pipeline(
        cls,
        folder: str | Path,
        max_sequence_length: int = 512,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "FluxTextEncoder":
        """Load only the tokenizers and text encoders of a FluxPipeline folder."""
        from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

        folder = Path(folder)
        parts = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
        check_parts_exist(folder, parts, "FLUX")
        tokenizer = load_part(CLIPTokenizer, folder / "tokenizer")
        tokenizer_2 = load_part(T5TokenizerFast, folder / "tokenizer_2")
        clip = load_encoder(CLIPTextModel, folder / "text_encoder", dtype, device)
        t5 = load_encoder(T5EncoderModel, folder / "text_encoder_2", dtype, device)
        check_tokenizer(folder / "tokenizer", tokenizer, clip.config)
        check_tokenizer(folder / "tokenizer_2", tokenizer_2, t5.config)
        return cls(tokenizer, clip, tokenizer_2, t5, max_sequence_length)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Conditioning without guidance, one row per prompt."""
        embeds, pooled = [], []
        for start in range(0, len(prompts), ENCODE_BATCH):
            chunk = list(prompts[start : start + ENCODE_BATCH])
            clip_ids, t5_ids = self._token_ids("CLIP", chunk), self._token_ids("T5", chunk)
            clip, t5 = self._parts["CLIP"][1], self._parts["T5"][1]
            pooled.append(clip(clip_ids.to(clip.device)).pooler_output)
            embeds.append(t5(t5_ids.to(t5.device)).last_hidden_state)
        return Conditioning(torch.cat(embeds), torch.cat(pooled))

    def _token_ids(self, encoder: str, prompts: list[str]) -> Tensor:
        tokenizer = self._parts[encoder][0]
        return tokenizer(
            prompts,
            padding="max_length",
            max_length=self._limits[encoder],
            truncation=True,
            return_tensors="pt",
        ).input_ids

    def notes(self, prompts: Sequence[str]) -> list[str]:
        """One line per prompt that `encode` cuts, then one per set that the cut makes equal."""
        tokenizers = {n: (tok, self._limits[n]) for n, (tok, _) in self._parts.items()}
        return describe_cuts(prompts, tokenizers)


class SyntheticTextEncoder:
    """Unit-variance embeddings drawn from a hash of the prompt, for models with random weights."""

    def __init__(self, prompt_length: int, dim: int, pooled_dim: int = 0) -> None:
        self.prompt_length, self.dim, self.pooled_dim = prompt_length, dim, pooled_dim

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Conditioning without guidance; the same prompt gives the same row on every machine."""
        embeds, pooled = [], []
        for prompt in prompts:
            digest = hashlib.sha256(prompt.encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
            embeds.append(torch.randn(self.prompt_length, self.dim, generator=generator))
            if self.pooled_dim:
                pooled.append(torch.randn(self.pooled_dim, generator=generator))
        return Conditioning(torch.stack(embeds), torch.stack(pooled) if pooled else None)

    def notes(self, prompts: Sequence[str]) -> list[str]:
        """Nothing is ever cut."""
        return []
