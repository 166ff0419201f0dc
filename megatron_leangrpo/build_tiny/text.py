# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Tiny text encoders with random, frozen weights and tokenizers made in memory.

A transformer learns a closed vocabulary from random features as well as from trained ones; what
counts is that prompts stay apart and that the parts are the real classes that FLUX.1-dev loads.
"""

import string
from collections.abc import Sequence
from typing import Any

from megatron_leangrpo.rewards.shapes import COLORS, DIRECTIONS, SHAPES

WORDS = ("the", "number", "a", *COLORS, *SHAPES)
MOTION_WORDS = ("a", *COLORS, *SHAPES, "moving", *DIRECTIONS)
TEXT_DIM = 64
CLIP_TOKENS = 77


def make_clip_tokenizer() -> Any:
    """A byte-level CLIPTokenizer that knows WORDS whole and spells everything else."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    pieces = [*alphabet, *(character + "</w>" for character in alphabet)]
    merges: list[tuple[str, str]] = []
    # Longer words first: their merges must win where words share a letter pair ("green" and "red").
    for word in sorted(WORDS, key=lambda word: (-len(word), word)):
        prefix = word[0]
        for position, character in enumerate(word[1:], start=2):
            suffix = character + "</w>" if position == len(word) else character
            if (prefix, suffix) not in merges:
                merges.append((prefix, suffix))
                pieces.append(prefix + suffix)
            prefix += suffix
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CLIP_TOKENS)


def make_t5_tokenizer(known: Sequence[str] = WORDS) -> Any:
    """A unigram T5TokenizerFast that knows words whole and spells all else in printable ASCII."""
    from transformers import T5TokenizerFast

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [(f"▁{word}", -1.0) for word in known]
    characters = [(character, -10.0) for character in string.printable[:94]]
    vocabulary = [*special, *words, ("▁", -5.0), *characters]
    return T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=512)


def make_clip_encoder(tokenizer: Any) -> Any:
    """A two-layer CLIPTextModel; call under a seeded generator."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_DIM,
        intermediate_size=2 * TEXT_DIM,
        projection_dim=TEXT_DIM,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config).eval().requires_grad_(False)


def make_t5_encoder(tokenizer: Any) -> Any:
    """A two-layer T5EncoderModel; call under a seeded generator."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(**_t5_fields(tokenizer))
    return T5EncoderModel(config).eval().requires_grad_(False)


def make_umt5_encoder(tokenizer: Any) -> Any:
    """A two-layer UMT5EncoderModel; call under a seeded generator."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(**_t5_fields(tokenizer))
    return UMT5EncoderModel(config).eval().requires_grad_(False)


def _t5_fields(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": TEXT_DIM,
        "d_kv": 16,
        "d_ff": 2 * TEXT_DIM,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
