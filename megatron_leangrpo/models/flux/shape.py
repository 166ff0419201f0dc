# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The sizes of a FLUX transformer in closed form."""

from megatron_leangrpo.models.common.shape import Companions, TransformerShape
from megatron_leangrpo.models.flux.config import SINUSOID_WIDTH, FluxConfig

PUBLISHED_COMPANIONS = Companions(
    # FLUX.1: T5-XXL's encoder and CLIP-L's text model, and the VAE, in bfloat16.
    text_encoders=2 * (4_762_310_656 + 123_060_480),
    codec=2 * 83_819_683,
)


def flux_shape(config: FluxConfig, image_tokens: int, text_tokens: int) -> TransformerShape:
    """Sizes at a number of image and text tokens."""
    sharded, replicated = _parameters(config)
    return TransformerShape(
        blocks=(("double", config.num_double_blocks), ("single", config.num_single_blocks)),
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        heads=config.num_attention_heads,
        image_tokens=image_tokens,
        text_tokens=text_tokens,
        text_width=config.joint_attention_dim,
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        sharded_parameters=sharded,
        replicated_parameters=replicated,
    )


def count_parameters(config: FluxConfig) -> int:
    """All parameters of the transformer."""
    return sum(_parameters(config))


def _parameters(config: FluxConfig) -> tuple[int, int]:
    """Parameters that tensor parallelism divides, and those on every rank."""
    hidden, ffn, head = config.hidden_size, config.ffn_hidden_size, config.head_dim
    double, single = config.num_double_blocks, config.num_single_blocks
    # Column-parallel linears have sharded biases, row-parallel ones replicated biases.
    modulation = hidden * hidden + hidden
    qkv, fc1 = 3 * (hidden * hidden + hidden), hidden * ffn + ffn
    stream = 6 * modulation + qkv + hidden * hidden + fc1 + ffn * hidden
    joined = 3 * modulation + qkv + fc1 + (hidden + ffn) * hidden
    sharded = 2 * double * stream + single * joined + 2 * modulation
    per_block = double * 2 * (2 * hidden + 2 * head) + single * (hidden + 2 * head)

    embedders = [SINUSOID_WIDTH, config.pooled_projection_dim]
    embedders += [SINUSOID_WIDTH] if config.guidance_embeds else []
    embedding = sum((width + 1) * hidden + (hidden + 1) * hidden for width in embedders)
    inputs = (config.in_channels + 1 + config.joint_attention_dim + 1) * hidden
    output = (hidden + 1) * config.out_channels
    return sharded, per_block + embedding + inputs + output
