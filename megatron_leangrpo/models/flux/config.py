# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Configuration of FLUX transformers and the presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_leangrpo.models.common.config import TransformerSettings

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

MLP_RATIO = 4
SINUSOID_WIDTH = 256


@dataclass(frozen=True, kw_only=True)
class FluxConfig(TransformerSettings):
    """Architecture of a FLUX transformer and how it is sharded; checked when built."""

    num_double_blocks: int = 19
    """Blocks in which image and text have weights of their own."""
    num_single_blocks: int = 38
    """Blocks over the joined tokens."""
    hidden_size: int = 3072
    """Width of the residual stream."""
    num_attention_heads: int = 24
    """Heads; the tensor-parallel size must divide them."""
    in_channels: int = 64
    out_channels: int = 64
    """Channels of the velocity of a token."""
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    """Width of the pooled prompt embedding (CLIP)."""
    guidance_embeds: bool = True
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)
    """Rotary dimensions of the axes (unused, row, column); they add up to the head dimension."""

    def __post_init__(self) -> None:
        self.check_layout(self.hidden_size, self.num_attention_heads)
        if sum(self.axes_dims_rope) != self.head_dim or any(d % 2 for d in self.axes_dims_rope):
            raise ValueError(
                f"axes_dims_rope {self.axes_dims_rope} must be even and add up to the head "
                f"dimension, {self.head_dim}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def ffn_hidden_size(self) -> int:
        """Width inside the MLPs."""
        return MLP_RATIO * self.hidden_size

    @property
    def block_weights(self) -> tuple[int, ...]:
        """Weights of every block, but for biases and norms."""
        squares = 4 + 2 * MLP_RATIO
        double = 2 * (squares + 6) * self.hidden_size**2
        single = (squares + 3) * self.hidden_size**2
        return (double,) * self.num_double_blocks + (single,) * self.num_single_blocks

    def transformer_config(self) -> TransformerConfig:
        """What megatron-core's layers, data-parallel wrapper and optimizer want to know."""
        return self.megatron_config(
            num_layers=self.num_double_blocks + self.num_single_blocks,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            ffn_hidden_size=self.ffn_hidden_size,
            # megatron sums the gradients of the per-head norms over tensor-parallel ranks.
            qk_layernorm=True,
        )


def flux_dev(**overrides: Any) -> FluxConfig:
    """FLUX.1-dev: 11 901 408 320 parameters."""
    return FluxConfig(**overrides)


def flux_slice(**overrides: Any) -> FluxConfig:
    """FLUX.1-dev's blocks at their real width, few enough for a measurement on one GPU."""
    return FluxConfig(**{"num_double_blocks": 2, "num_single_blocks": 4, **overrides})


def flux_tiny(**overrides: Any) -> FluxConfig:
    """The embedded base model's shape, which trains in seconds on a laptop."""
    return FluxConfig(
        **{
            "num_double_blocks": 1,
            "num_single_blocks": 3,
            "hidden_size": 96,
            "num_attention_heads": 4,
            "in_channels": 16,
            "out_channels": 16,
            "joint_attention_dim": 64,
            "pooled_projection_dim": 64,
            "axes_dims_rope": (8, 8, 8),
            **overrides,
        }
    )


def flux_bench(**overrides: Any) -> FluxConfig:
    """Large enough that matrix products dominate, small enough to time on one core."""
    return FluxConfig(
        **{
            "num_double_blocks": 2,
            "num_single_blocks": 4,
            "hidden_size": 256,
            "num_attention_heads": 4,
            "joint_attention_dim": 256,
            "pooled_projection_dim": 256,
            "axes_dims_rope": (16, 24, 24),
            **overrides,
        }
    )


PRESETS = {
    "flux_dev": flux_dev,
    "flux_slice": flux_slice,
    "flux_tiny": flux_tiny,
    "flux_bench": flux_bench,
}

# Our field for each field of diffusers' FluxTransformer2DModel; the head dimension is derived.
_DIFFUSERS_FIELDS = {
    "num_layers": "num_double_blocks",
    "num_single_layers": "num_single_blocks",
    "num_attention_heads": "num_attention_heads",
    "in_channels": "in_channels",
    "joint_attention_dim": "joint_attention_dim",
    "pooled_projection_dim": "pooled_projection_dim",
    "guidance_embeds": "guidance_embeds",
}
_DIFFUSERS_DEFAULTS = {
    "num_layers": 19,
    "num_single_layers": 38,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "in_channels": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}


def from_diffusers_config(config: Mapping[str, Any], **overrides: Any) -> FluxConfig:
    """Our configuration for a diffusers `config.json`; unknown keys are not ours to judge.

    Absent keys mean diffusers' defaults. `overrides` are fields of FluxConfig that a file does not
    hold: the parallel layout, the dtype, recomputation.
    """
    patch_size = config.get("patch_size", 1)
    if patch_size != 1:
        raise ValueError(f"patch_size is {patch_size}; FLUX packs its patches outside: only 1")
    full = {**_DIFFUSERS_DEFAULTS, **config}
    out_channels = full.get("out_channels") or full["in_channels"]
    if out_channels != full["in_channels"]:
        raise ValueError(
            f"in_channels is {full['in_channels']} and out_channels {out_channels}: a policy "
            "denoises its own input, so both must be equal (inpainting and control variants cannot "
            "be one)"
        )
    return FluxConfig(
        hidden_size=full["num_attention_heads"] * full["attention_head_dim"],
        out_channels=out_channels,
        axes_dims_rope=tuple(full["axes_dims_rope"]),
        **{ours: full[theirs] for theirs, ours in _DIFFUSERS_FIELDS.items()},
        **overrides,
    )


def to_diffusers_config(config: FluxConfig) -> dict[str, Any]:
    """The `config.json` with which diffusers builds the same architecture."""
    return {
        "_class_name": "FluxTransformer2DModel",
        "patch_size": 1,
        "out_channels": config.out_channels,
        "attention_head_dim": config.head_dim,
        "axes_dims_rope": list(config.axes_dims_rope),
        **{theirs: getattr(config, ours) for theirs, ours in _DIFFUSERS_FIELDS.items()},
    }
