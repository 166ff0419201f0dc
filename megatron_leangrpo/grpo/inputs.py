# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What goes into a rollout besides the transformer: prompts, text encoders and the latent codec."""

import json
from pathlib import Path

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.codecs import FLUX_MULTIPLE, LatentCodec, PatchCodec, VaeCodec
from megatron_leangrpo.codecs.base import token_grid
from megatron_leangrpo.conditioning.encoders import (
    FluxTextEncoder,
    SyntheticTextEncoder,
    TextEncoder,
)
from megatron_leangrpo.conditioning.prompts import Prompt, load_prompts
from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.grpo.architecture import Architecture
from megatron_leangrpo.grpo.assets import resolve_asset


def read_prompts(config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Return training and evaluation prompts; the latter default to the former."""
    if config.prompts.train is None:
        raise ValueError("prompts.train is not set; give a .txt or .jsonl file of prompts")
    train = load_prompts(_existing("prompts.train", config.prompts.train))
    if config.prompts.evaluation is None:
        return train, train
    return train, load_prompts(_existing("prompts.evaluation", config.prompts.evaluation))


def _existing(setting: str, name: str) -> Path:
    path = resolve_asset(name)
    if path is None:
        raise ValueError(f"{setting} = {name!r}: no such file")
    return path


def build_encoder(config: RunConfig, architecture: Architecture) -> TextEncoder:
    """Load the base's text encoders; hashed embeddings stand in for a model of random weights."""
    flux = architecture.config
    if architecture.base is None:
        return SyntheticTextEncoder(
            config.model.max_text_tokens, flux.joint_attention_dim, flux.pooled_projection_dim
        )
    return FluxTextEncoder.from_pipeline(
        architecture.base,
        max_sequence_length=config.model.max_text_tokens,
        # A float64 run sees the same embeddings as a float32 run.
        dtype=torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32,
        device=platform.device(),
    )


def latent_geometry(
    config: RunConfig, architecture: Architecture
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (tokens, channels) and (rows, columns) of a sample; reads no weights.

    Raises ``ValueError`` for a size that does not fit, naming the nearest ones that do.
    """
    multiple = FLUX_MULTIPLE
    if architecture.base is not None:
        path = architecture.base / "vae" / "config.json"
        try:
            multiple = 2 ** len(json.loads(path.read_text(encoding="utf-8"))["block_out_channels"])
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(f"model.base: {path} is not a readable VAE config: {error}") from error
    rows, columns = token_grid(config.sampling.height, config.sampling.width, multiple)
    return (rows * columns, architecture.config.in_channels), (rows, columns)


def build_codec(architecture: Architecture) -> LatentCodec:
    """Load the base's VAE; a model of random weights gets the parameter-free patch codec."""
    if architecture.base is None:
        return PatchCodec(architecture.config.in_channels, FLUX_MULTIPLE)
    return VaeCodec.from_pipeline(architecture.base, device=platform.device())
