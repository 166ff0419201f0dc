# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Frozen text encoders: prompts in, the transformer's conditioning out."""

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

ENCODE_BATCH = 32


@dataclass(frozen=True)
class Conditioning:
    """What a FLUX transformer is conditioned on, row by row."""

    prompt_embeds: Tensor
    """[b, s, joint_attention_dim]"""
    pooled: Tensor
    """[b, pooled_projection_dim]"""
    guidance: Tensor | None = None
    """[b], not multiplied by 1000; None for models without guidance."""

    def select(self, indices: Sequence[int] | Tensor) -> "Conditioning":
        """The given rows, in the given order; rows may repeat."""
        rows = torch.as_tensor(indices, device=self.pooled.device)
        guidance = None if self.guidance is None else self.guidance[rows]
        return Conditioning(self.prompt_embeds[rows], self.pooled[rows], guidance)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Conditioning":
        """Move everything; the guidance stays in float32, as in diffusers' pipelines."""
        guidance = None if self.guidance is None else self.guidance.to(device)
        return Conditioning(
            self.prompt_embeds.to(device, dtype), self.pooled.to(device, dtype), guidance
        )

    def with_guidance(self, scale: float) -> "Conditioning":
        """The same with one guidance scale for all rows."""
        guidance = torch.full((len(self.pooled),), scale, device=self.pooled.device)
        return dataclasses.replace(self, guidance=guidance)


class TextEncoder(Protocol):
    """Turns prompts into conditioning without gradient."""

    def encode(self, prompts: Sequence[str]) -> Conditioning: ...

    def notes(self, prompts: Sequence[str]) -> list[str]: ...


def shorten(text: str, limit: int = 60) -> str:
    """The text on one line, its middle left out if it is long."""
    text = " ".join(text.split())
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]} … {text[-half:]}"


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
        for part in ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"):
            if not (folder / part).is_dir():
                raise ValueError(
                    f"model.base: {folder} is not a FLUX pipeline folder, {part}/ is missing"
                )

        def load(kind: Any, part: str, **options: Any) -> Any:
            try:
                return kind.from_pretrained(folder / part, local_files_only=True, **options)
            except Exception as error:
                cause = " ".join(str(error).split())
                raise ValueError(
                    f"model.base: {folder / part} cannot be loaded: {cause:.300}"
                ) from error

        def load_model(kind: Any, part: str) -> Any:
            model, report = load(kind, part, dtype=dtype, output_loading_info=True)
            if missing := sorted(report["missing_keys"]):
                # transformers would fill them with random numbers.
                raise ValueError(
                    f"model.base: {folder / part} misses {len(missing)} of the text encoder's "
                    f"tensors, such as {missing[0]}"
                )
            return model.to(device).eval().requires_grad_(False)

        tokenizer = load(CLIPTokenizer, "tokenizer")
        tokenizer_2 = load(T5TokenizerFast, "tokenizer_2")
        clip = load_model(CLIPTextModel, "text_encoder")
        t5 = load_model(T5EncoderModel, "text_encoder_2")
        _check_tokenizer(folder / "tokenizer", tokenizer, clip.config)
        _check_tokenizer(folder / "tokenizer_2", tokenizer_2, t5.config)
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
        cut: dict[str, str] = {}
        equal: dict[tuple[tuple[int, ...], ...], list[str]] = defaultdict(list)
        for prompt in dict.fromkeys(prompts):
            lengths = {
                name: len(tokenizer(prompt, verbose=False).input_ids)
                for name, (tokenizer, _) in self._parts.items()
            }
            kept = [
                f"{name} keeps {limit} of {lengths[name]} tokens"
                for name, limit in self._limits.items()
                if lengths[name] > limit
            ]
            if not kept:
                continue
            cut[prompt] = f'prompt "{shorten(prompt)}" is cut: {", ".join(kept)}'
            ids = (self._token_ids(name, [prompt])[0].tolist() for name in self._parts)
            equal[tuple(map(tuple, ids))].append(prompt)
        return [
            *cut.values(),
            *(
                "these prompts are equal after the cut, their groups stay apart: "
                + ", ".join(f'"{shorten(p)}"' for p in group)
                for group in equal.values()
                if len(group) > 1
            ),
        ]


def _check_tokenizer(folder: Path, tokenizer: Any, config: Any) -> None:
    """ValueError for files that are missing, out of which transformers makes an empty tokenizer."""
    known, needed = len(tokenizer), config.vocab_size
    # T5's table is padded by 28 rows.
    if not 0.9 * needed <= known <= needed:
        raise ValueError(
            f"model.base: {folder} has {known} tokens, its text encoder {needed}: files of the "
            "tokenizer are missing, or of another model"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and tokenizer.model_max_length > positions:
        raise ValueError(
            f"model.base: {folder} sets no model_max_length up to {positions}, which its text "
            "encoder can take at most; is tokenizer_config.json missing?"
        )


class SyntheticTextEncoder:
    """Unit-variance embeddings drawn from a hash of the prompt, for models with random weights."""

    def __init__(self, prompt_length: int, dim: int, pooled_dim: int) -> None:
        self.prompt_length, self.dim, self.pooled_dim = prompt_length, dim, pooled_dim

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Conditioning without guidance; the same prompt gives the same row on every machine."""
        embeds, pooled = [], []
        for prompt in prompts:
            digest = hashlib.sha256(prompt.encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
            embeds.append(torch.randn(self.prompt_length, self.dim, generator=generator))
            pooled.append(torch.randn(self.pooled_dim, generator=generator))
        return Conditioning(torch.stack(embeds), torch.stack(pooled))

    def notes(self, prompts: Sequence[str]) -> list[str]:
        """Nothing is ever cut."""
        return []
