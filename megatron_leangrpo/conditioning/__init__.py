# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Text encoders, prompt files and the order in which prompts are used."""

from megatron_leangrpo.conditioning.encoders import (
    Conditioning,
    FluxTextEncoder,
    SyntheticTextEncoder,
    TextEncoder,
)
from megatron_leangrpo.conditioning.prompts import Prompt, PromptSampler, load_prompts
from megatron_leangrpo.conditioning.wan import WanTextEncoder

__all__ = [
    "Conditioning",
    "FluxTextEncoder",
    "Prompt",
    "PromptSampler",
    "SyntheticTextEncoder",
    "TextEncoder",
    "WanTextEncoder",
    "load_prompts",
]
