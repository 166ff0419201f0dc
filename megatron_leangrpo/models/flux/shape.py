# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The sizes of a FLUX transformer in closed form."""

from megatron_leangrpo.models.common.shape import Companions, Parameters, TransformerShape
from megatron_leangrpo.models.flux.config import SINUSOID_WIDTH, FluxConfig

PUBLISHED_COMPANIONS = Companions(
    # FLUX.1: T5-XXL's encoder and CLIP-L's text model, and the VAE, in bfloat16.
    text_encoders=2 * (4_762_310_656 + 123_060_480),
    codec=2 * 83_819_683,
)


def flux_shape(config: FluxConfig, image_tokens: int, text_tokens: int) -> TransformerShape:
    """Sizes at a number of image and text tokens."""
    double, single, embedders, output = _parameters(config)
    return TransformerShape(
        blocks=(("double", config.num_double_blocks), ("single", config.num_single_blocks)),
        block_parameters=(double, single),
        embedders=embedders,
        output=output,
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        heads=config.num_attention_heads,
        image_tokens=image_tokens,
        text_tokens=text_tokens,
        text_width=config.joint_attention_dim,
        in_channels=config.in_channels,
        out_channels=config.out_channels,
    )


def count_parameters(config: FluxConfig) -> int:
    """All parameters of the transformer."""
    return flux_shape(config, 0, 0).parameters


def _parameters(config: FluxConfig) -> tuple[Parameters, Parameters, Parameters, Parameters]:
    """Those of a double block, of a single one, of the embedders and of the output."""
    hidden, ffn, head = config.hidden_size, config.ffn_hidden_size, config.head_dim
    # Column-parallel linears have sharded biases, row-parallel ones replicated biases.
    modulation = hidden * hidden + hidden
    qkv, fc1 = 3 * (hidden * hidden + hidden), hidden * ffn + ffn
    stream = 6 * modulation + qkv + hidden * hidden + fc1 + ffn * hidden
    joined = 3 * modulation + qkv + fc1 + (hidden + ffn) * hidden

    embedders = [SINUSOID_WIDTH, config.pooled_projection_dim]
    embedders += [SINUSOID_WIDTH] if config.guidance_embeds else []
    embedding = sum((width + 1) * hidden + (hidden + 1) * hidden for width in embedders)
    inputs = (config.in_channels + 1 + config.joint_attention_dim + 1) * hidden
    return (
        Parameters(2 * stream, 2 * (2 * hidden + 2 * head)),
        Parameters(joined, hidden + 2 * head),
        Parameters(0, embedding + inputs),
        Parameters(2 * modulation, (hidden + 1) * config.out_channels),
    )
