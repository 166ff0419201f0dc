# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What goes into a rollout besides the transformer: prompts, text encoders and the latent codec."""

import json
from pathlib import Path
from typing import Any

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
from megatron_leangrpo.rewards.registry import WeightedReward


def read_prompts(config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Return training and evaluation prompts; the latter default to the former."""
    if config.prompts.train is None:
        raise ValueError("prompts.train is not set; give a .txt or .jsonl file of prompts")
    train = _read_prompt_file("prompts.train", config.prompts.train)
    if config.prompts.evaluation is None:
        return train, train
    return train, _read_prompt_file("prompts.evaluation", config.prompts.evaluation)


def _read_prompt_file(setting: str, name: str) -> list[Prompt]:
    path = resolve_asset(name)
    if path is None:
        raise ValueError(f"{setting} = {name!r}: no such file")
    try:
        return load_prompts(path)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error


def check_prompts(
    config: RunConfig, reward: WeightedReward, train: list[Prompt], evaluation: list[Prompt]
) -> None:
    """Raise ``ValueError`` with file and line for prompts that a reward could never score."""
    reward.validate(train, config.prompts.train)
    if config.prompts.evaluation is not None:
        reward.validate(evaluation, config.prompts.evaluation)


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
    multiple = architecture.config.pixels_per_token or FLUX_MULTIPLE
    if architecture.base is not None and architecture.config.pixels_per_token is None:
        multiple = 2 ** len(_read_part(architecture.base, "vae", "block_out_channels"))
    rows, columns = token_grid(config.sampling.height, config.sampling.width, multiple)
    frames = architecture.config.latent_frames(config.sampling.num_frames)
    return (frames * rows * columns, architecture.config.in_channels), (rows, columns)


def check_parts(architecture: Architecture) -> None:
    """Raise ``ValueError`` for a VAE or text encoder of another width than the transformer's."""
    if architecture.base is None:
        return
    model = architecture.config
    for part, key, factor, name, needed in (
        ("vae", "latent_channels", 4, "in_channels", model.in_channels),
        ("text_encoder", "hidden_size", 1, "pooled_projection_dim", model.pooled_projection_dim),
        ("text_encoder_2", "d_model", 1, "joint_attention_dim", model.joint_attention_dim),
    ):
        found = _read_part(architecture.base, part, key)
        if found * factor != needed:
            raise ValueError(
                f"model.base: {key} is {found} in {architecture.base / part}, but the transformer "
                f"has {name} {needed} and so needs {needed // factor}: the parts are of different "
                "models"
            )


def _read_part(base: Path, part: str, key: str) -> Any:
    path = base / part / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"model.base: {path} does not say {key}: {error!r}") from error


def build_codec(architecture: Architecture) -> LatentCodec:
    """Load the base's VAE; a model of random weights gets the parameter-free patch codec."""
    if architecture.base is None:
        return PatchCodec(architecture.config.in_channels, FLUX_MULTIPLE)
    return VaeCodec.from_pipeline(architecture.base, device=platform.device())
