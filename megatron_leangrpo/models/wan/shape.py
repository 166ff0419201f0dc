# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The sizes of a Wan transformer in closed form."""

from megatron_leangrpo.models.common.shape import Companions, Parameters, TransformerShape
from megatron_leangrpo.models.wan.config import PATCH, SINUSOID_WIDTH, WanConfig

PUBLISHED_COMPANIONS = Companions(
    # UMT5-XXL's encoder in bfloat16 and the causal video VAE in float32, as the authors run them.
    text_encoders=2 * 5_680_910_336,
    codec=4 * 126_892_531,
)


def wan_shape(config: WanConfig, video_tokens: int, text_tokens: int) -> TransformerShape:
    """Sizes at a number of video and text tokens."""
    block, embedders, output = _parameters(config)
    return TransformerShape(
        blocks=(("cross", config.num_layers),),
        block_parameters=(block,),
        embedders=embedders,
        output=output,
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size,
        heads=config.num_attention_heads,
        image_tokens=video_tokens,
        text_tokens=text_tokens + config.image_condition_tokens,
        text_width=config.joint_attention_dim,
        in_channels=PATCH * config.in_channels,
        out_channels=PATCH * config.out_channels,
        experts=config.experts,
    )


def count_parameters(config: WanConfig) -> int:
    """All parameters, those of both experts where there are two."""
    return wan_shape(config, 0, 0).parameters


def _parameters(config: WanConfig) -> tuple[Parameters, Parameters, Parameters]:
    """Those of a block, of the embedders and of the output, of one expert."""
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    square = hidden * hidden
    # Column-parallel linears and the norms across heads have sharded vectors; the biases of
    # row-parallel linears are replicated.
    self_attention = 3 * (square + hidden) + 2 * hidden + square
    cross_attention = self_attention
    mlp = hidden * ffn + ffn + ffn * hidden
    if config.image_dim:
        cross_attention += 2 * (square + hidden) + hidden
    sharded = self_attention + cross_attention + mlp

    # Three row-parallel biases, the affine norm, and the modulation table.
    per_block = 3 * hidden + 2 * hidden + 6 * hidden
    time = (SINUSOID_WIDTH + 1) * hidden + (hidden + 1) * hidden + (hidden + 1) * 6 * hidden
    text = (config.joint_attention_dim + 1) * hidden + (hidden + 1) * hidden
    patch_in = (PATCH * config.in_channels + 1) * hidden
    head = 2 * hidden + (hidden + 1) * PATCH * config.out_channels
    image = 0
    if config.image_dim:
        width = config.image_dim
        image = 2 * width + (width + 1) * width + (width + 1) * hidden + 2 * hidden
    embedders = time + text + patch_in + image
    return Parameters(sharded, per_block), Parameters(0, embedders), Parameters(0, head)
