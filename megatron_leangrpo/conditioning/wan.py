# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Wan's text encoder: UMT5 alone, the prompt cleaned before and the padding zeroed after."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_leangrpo.conditioning.cuts import describe_cuts
from megatron_leangrpo.conditioning.encoders import ENCODE_BATCH, Conditioning
from megatron_leangrpo.conditioning.loading import (
    check_parts_exist,
    check_tokenizer,
    load_encoder,
    load_part,
)

MAX_TEXT_TOKENS = 512
"""Text tokens that the published Wan models were trained with."""


def clean_prompt(prompt: str) -> str:
    """What WanPipeline encodes: broken Unicode and HTML entities mended, spaces single."""
    import ftfy

    return " ".join(html.unescape(html.unescape(ftfy.fix_text(prompt))).split())


class WanTextEncoder:
    """UMT5 of a Wan pipeline, equal to WanPipeline.encode_prompt.

    The embeddings of the padding are replaced by zeros, and those take part: Wan attends to all
    `max_sequence_length` positions without a mask.
    """

    def __init__(
        self, tokenizer: Any, umt5: Any, max_sequence_length: int = MAX_TEXT_TOKENS
    ) -> None:
        if not 1 <= max_sequence_length <= MAX_TEXT_TOKENS:
            raise ValueError(
                f"model.max_text_tokens = {max_sequence_length}: Wan takes 1 to {MAX_TEXT_TOKENS}"
            )
        self._tokenizer, self._umt5, self._length = tokenizer, umt5, max_sequence_length

    @classmethod
    def from_pipeline(
        cls,
        folder: str | Path,
        max_sequence_length: int = MAX_TEXT_TOKENS,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "WanTextEncoder":
        """Load only the tokenizer and the text encoder of a WanPipeline folder."""
        from transformers import T5TokenizerFast, UMT5EncoderModel

        folder = Path(folder)
        check_parts_exist(folder, ("tokenizer", "text_encoder"), "Wan")
        tokenizer = load_part(T5TokenizerFast, folder / "tokenizer")
        umt5 = load_encoder(UMT5EncoderModel, folder / "text_encoder", dtype, device)
        check_tokenizer(folder / "tokenizer", tokenizer, umt5.config)
        return cls(tokenizer, umt5, max_sequence_length)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """One row per prompt; the empty prompt of classifier-free guidance is one too."""
        embeds = []
        for start in range(0, len(prompts), ENCODE_BATCH):
            tokens = self._tokenizer(
                [clean_prompt(prompt) for prompt in prompts[start : start + ENCODE_BATCH]],
                padding="max_length",
                max_length=self._length,
                truncation=True,
                return_tensors="pt",
            ).to(self._umt5.device)
            hidden = self._umt5(tokens.input_ids, tokens.attention_mask).last_hidden_state
            embeds.append(hidden.masked_fill(tokens.attention_mask[..., None] == 0, 0.0))
        return Conditioning(torch.cat(embeds))

    def notes(self, prompts: Sequence[str]) -> list[str]:
        """One line per prompt that `encode` cuts, then one per set that the cut makes equal."""
        return describe_cuts(prompts, {"UMT5": (self._tokenizer, self._length)}, clean_prompt)
