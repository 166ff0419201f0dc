# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What goes into a rollout besides the transformer: prompts, text encoders and the latent codec."""

import dataclasses
import json
import math
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from megatron_leangrpo import platform
from megatron_leangrpo.codecs import (
    LatentCodec,
    PatchCodec,
    VaeCodec,
    VideoPatchCodec,
    WanVaeCodec,
)
from megatron_leangrpo.codecs.base import token_grid
from megatron_leangrpo.conditioning import (
    FluxTextEncoder,
    Prompt,
    SyntheticTextEncoder,
    TextEncoder,
    WanTextEncoder,
    load_prompts,
)
from megatron_leangrpo.conditioning.cache import CachedEncoder, encoder_identity
from megatron_leangrpo.conditioning.prompts import describe_lines, hold_out
from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.grpo.architecture import Architecture
from megatron_leangrpo.grpo.assets import resolve_asset
from megatron_leangrpo.models.common.config import TransformerSettings
from megatron_leangrpo.rewards.registry import WeightedReward


def read_prompts(config: RunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Return training and evaluation prompts; the latter default to the former."""
    settings = config.prompts
    if settings.train is None:
        raise ValueError("prompts.train is not set; give a .txt, .jsonl or .parquet file")
    train = _read_prompt_file("prompts.train", settings.train)
    if settings.evaluation is not None:
        if settings.held_out:
            raise ValueError(
                f"prompts.held_out = {settings.held_out} beside prompts.evaluation, which gives "
                "the evaluation's prompts; valid: 0, or no prompts.evaluation"
            )
        return train, _read_prompt_file("prompts.evaluation", settings.evaluation)
    if settings.held_out:
        return hold_out(train, settings.held_out)
    return train, train


def describe_prompts(config: RunConfig) -> list[str]:
    """What may be a mistake in the prompt files, a line each."""
    names = [
        ("prompts.train", config.prompts.train),
        ("prompts.evaluation", config.prompts.evaluation),
    ]
    files = [
        (name, _read_prompt_file(setting, name)) for setting, name in names if name is not None
    ]
    return [note for name, prompts in files for note in describe_lines(name, prompts)]


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
    reward.check_medium(videos=config.model.family == "wan")
    if evaluation is not train:
        reward.validate(evaluation, config.prompts.evaluation or config.prompts.train)


def build_encoder(config: RunConfig, architecture: Architecture) -> TextEncoder:
    """Load the base's text encoders; hashed embeddings stand in for a model of random weights.

    With `prompts.embedding_cache` they are loaded when there is something new to encode.
    """
    model, base = architecture.config, architecture.base
    if base is None:
        return SyntheticTextEncoder(
            config.model.max_text_tokens, model.joint_attention_dim, model.pooled_projection_dim
        )
    kind = FluxTextEncoder if model.temporal_stride is None else WanTextEncoder
    # A float64 run sees the same embeddings as a float32 run.
    dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    length = config.model.max_text_tokens

    def load() -> TextEncoder:
        return kind.from_pipeline(
            base, max_sequence_length=length, dtype=dtype, device=platform.device()
        )

    if config.prompts.embedding_cache is None:
        return load()
    cache = Path(config.prompts.embedding_cache)
    settings = {"encoder": kind.__name__, "dtype": str(dtype), "length": length}
    identity = platform.text_from_first_rank(lambda: encoder_identity(base, cache, **settings))
    return CachedEncoder(cache, identity, load)


def latent_geometry(
    config: RunConfig, architecture: Architecture
) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return (tokens, channels) of a sample and the grid of its tokens; reads no weights.

    Raises ``ValueError`` for a size that does not fit, naming the nearest ones that do.
    """
    settings, sampling = with_strides(architecture), config.sampling
    rows, columns = token_grid(sampling.height, sampling.width, settings.pixels_per_token)
    grid = settings.token_grid(sampling.num_frames, rows, columns)
    return (math.prod(grid), settings.latent_channels), grid


def with_strides(architecture: Architecture) -> TransformerSettings:
    """The model's configuration with the strides of the pipeline's VAE, where there is one."""
    base, family = architecture.base, architecture.family
    if base is None:
        return architecture.config
    strides = _read_part(base, "vae", family.vae_strides)
    return dataclasses.replace(architecture.config, **strides)


def check_parts(architecture: Architecture) -> None:
    """Raise ``ValueError`` for a model that no run can use, or parts that do not fit together."""
    if architecture.config.takes_picture:
        raise ValueError(
            "model.base and model.preset: an image-to-video model starts from a picture for each "
            "prompt, which runs do not have; valid: text-to-video models"
        )
    base = architecture.base
    for part in () if base is None else architecture.family.parts:
        found = _read_part(base, part.folder, itemgetter(part.key))
        needed = getattr(architecture.config, part.name)
        if found * part.factor != needed:
            raise ValueError(
                f"model.base: {part.key} is {found} in {base / part.folder}, but the transformer "
                f"has {part.name} {needed} and so needs {needed // part.factor}: the parts are of "
                "different models"
            )


def _read_part(base: Path, part: str, read: Callable[[dict[str, Any]], Any]) -> Any:
    path = base / part / "config.json"
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except KeyError as error:
        raise ValueError(f"model.base: {path} does not say {error.args[0]}: {error!r}") from error
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"model.base: {path} cannot be read: {error!r}") from error


def build_codec(architecture: Architecture) -> LatentCodec:
    """Load the base's VAE; a model of random weights gets the parameter-free patch codec."""
    model, base = architecture.config, architecture.base
    if base is None:
        sizes = model.latent_channels, model.pixels_per_token
        if model.temporal_stride is None:
            return PatchCodec(*sizes)
        return VideoPatchCodec(*sizes, model.temporal_stride)
    codec = VaeCodec if model.temporal_stride is None else WanVaeCodec
    return codec.from_pipeline(base, device=platform.device())
