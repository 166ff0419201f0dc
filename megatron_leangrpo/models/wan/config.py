# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Configuration of Wan 2.1 and 2.2 transformers and the presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_leangrpo.models.common.config import TransformerSettings

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

PATCH_SIZE = (1, 2, 2)
PATCH = 4
"""Latent positions in one token."""
SINUSOID_WIDTH = 256
IMAGE_CONDITION_TOKENS = 257
"""CLIP tokens of the first frame that Wan 2.1's image-to-video model attends to."""


@dataclass(frozen=True, kw_only=True)
class WanConfig(TransformerSettings):
    """Architecture of a Wan transformer and how it is sharded; checked when built."""

    num_layers: int = 40
    hidden_size: int = 5120
    """Width of the residual stream."""
    num_attention_heads: int = 40
    """Heads; the tensor-parallel size must divide them."""
    ffn_hidden_size: int = 13824
    """Width inside the MLPs."""
    in_channels: int = 16
    """Channels of the latent video, and of the condition beside it in image-to-video models."""
    out_channels: int = 16
    joint_attention_dim: int = 4096
    image_dim: int | None = None
    """Width of the image embedding (Wan 2.1 image-to-video); None without an image branch."""
    temporal_stride: int = 4
    """Frames that become one latent frame, after the first."""

    def __post_init__(self) -> None:
        self.check_layout(self.hidden_size, self.num_attention_heads)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def block_weights(self) -> tuple[int, ...]:
        """Weights of every block, but for biases and norms."""
        squares = 10 if self.image_dim else 8
        weights = squares * self.hidden_size**2 + 2 * self.hidden_size * self.ffn_hidden_size
        return (weights,) * self.num_layers

    @property
    def latent_channels(self) -> int:
        """Numbers of a token's velocity, and of the latents that it moves."""
        return PATCH * self.out_channels

    @property
    def takes_picture(self) -> bool:
        """Whether a picture's latents stand beside the video's."""
        return self.in_channels > self.out_channels

    @property
    def image_condition_tokens(self) -> int:
        """Tokens of a conditioning picture that are attended to beside the text."""
        return 0 if self.image_dim is None else IMAGE_CONDITION_TOKENS

    def transformer_config(self) -> TransformerConfig:
        """What megatron-core's layers, data-parallel wrapper and optimizer want to know."""
        return self.megatron_config(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            ffn_hidden_size=self.ffn_hidden_size,
            # The norms span all heads and are sharded: megatron must not sum their gradients.
            qk_layernorm=False,
        )


def wan21_14b(**overrides: Any) -> WanConfig:
    """Wan 2.1 text-to-video 14B: 14 288 491 584 parameters."""
    return WanConfig(**overrides)


def wan21_1_3b(**overrides: Any) -> WanConfig:
    """Wan 2.1 text-to-video 1.3B: 1 418 996 800 parameters."""
    small = {"num_layers": 30, "hidden_size": 1536, "num_attention_heads": 12}
    return WanConfig(**{**small, "ffn_hidden_size": 8960, **overrides})


def wan21_i2v_14b(**overrides: Any) -> WanConfig:
    """Wan 2.1 image-to-video 14B: 16 394 878 784 parameters."""
    return WanConfig(**{"in_channels": 36, "image_dim": 1280, **overrides})


def wan22_a14b(**overrides: Any) -> WanConfig:
    """Wan 2.2 text-to-video A14B: two transformers of 14 288 491 584 parameters."""
    return WanConfig(**{"experts": 2, "expert_boundary": 0.875, **overrides})


def wan22_5b(**overrides: Any) -> WanConfig:
    """Wan 2.2 text- and image-to-video 5B: 4 999 787 712 parameters."""
    sizes = {"num_layers": 30, "hidden_size": 3072, "num_attention_heads": 24}
    latents = {"in_channels": 48, "out_channels": 48, "spatial_stride": 16}
    return WanConfig(**{**sizes, "ffn_hidden_size": 14336, **latents, **overrides})


def wan_tiny(**overrides: Any) -> WanConfig:
    """A shape that computes in milliseconds."""
    sizes = {"num_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "ffn_hidden_size": 256}
    return WanConfig(**{**sizes, "joint_attention_dim": 64, **overrides})


def wan_bench(**overrides: Any) -> WanConfig:
    """Large enough that matrix products dominate, small enough to time on one core."""
    sizes = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
    return wan_tiny(**{**sizes, "ffn_hidden_size": 1024, "joint_attention_dim": 256, **overrides})


PRESETS = {
    "wan21_1.3b": wan21_1_3b,
    "wan21_14b": wan21_14b,
    "wan21_i2v_14b": wan21_i2v_14b,
    "wan22_a14b": wan22_a14b,
    "wan22_5b": wan22_5b,
    "wan_tiny": wan_tiny,
    "wan_bench": wan_bench,
}

# Our field for each field of diffusers' WanTransformer3DModel; the head dimension is derived.
_DIFFUSERS_FIELDS = {
    "num_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "ffn_dim": "ffn_hidden_size",
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "text_dim": "joint_attention_dim",
    "image_dim": "image_dim",
}
_DIFFUSERS_DEFAULTS = {
    "num_layers": 40,
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "ffn_dim": 13824,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "image_dim": None,
    "patch_size": PATCH_SIZE,
    "qk_norm": "rms_norm_across_heads",
    "cross_attn_norm": True,
}
_FIXED = ("patch_size", "qk_norm", "cross_attn_norm")
_WAN22_VAE_CHANNELS = 48
"""Latent channels that only the VAE with stride 16 has."""


def from_diffusers_config(config: Mapping[str, Any], **overrides: Any) -> WanConfig:
    """Our configuration for a diffusers `config.json`; unknown keys are not ours to judge.

    Absent keys mean diffusers' defaults. `overrides` are fields of WanConfig that a file does not
    hold: the parallel layout, the dtype, recomputation, the number of experts.
    """
    full = {**_DIFFUSERS_DEFAULTS, **config}
    for key in _FIXED:
        value = tuple(full[key]) if isinstance(full[key], list) else full[key]
        if value != _DIFFUSERS_DEFAULTS[key]:
            raise ValueError(
                f"{key} is {full[key]}; every published Wan has {_DIFFUSERS_DEFAULTS[key]}, "
                "and nothing else is supported"
            )
    stride = 16 if full["out_channels"] == _WAN22_VAE_CHANNELS else 8
    return WanConfig(
        hidden_size=full["num_attention_heads"] * full["attention_head_dim"],
        **{ours: full[theirs] for theirs, ours in _DIFFUSERS_FIELDS.items()},
        **{"spatial_stride": stride, **overrides},
    )


def to_diffusers_config(config: WanConfig) -> dict[str, Any]:
    """The `config.json` with which diffusers builds the same architecture."""
    return {
        "_class_name": "WanTransformer3DModel",
        "patch_size": list(PATCH_SIZE),
        "attention_head_dim": config.head_dim,
        "freq_dim": SINUSOID_WIDTH,
        "qk_norm": _DIFFUSERS_DEFAULTS["qk_norm"],
        "cross_attn_norm": True,
        "eps": 1e-6,
        "added_kv_proj_dim": config.hidden_size if config.image_dim else None,
        **{theirs: getattr(config, ours) for theirs, ours in _DIFFUSERS_FIELDS.items()},
    }
