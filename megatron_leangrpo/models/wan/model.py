# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Wan 2.1 and 2.2 from top to bottom, on megatron-core's tensor- and sequence-parallel layers.

Letters: s video tokens, b samples, h hidden features; tensors are `[s, b, h]` inside. `e` is the
embedded noise level and `e0` its six vectors that, with a table in every block, shift, scale and
gate the block (names of the authors' code).
Under sequence parallelism the video's tokens are sharded between the projections, and over the
context-parallel ranks everywhere but inside self-attention; the text and a conditioning picture are
short and whole on every rank.

Whatever the model's dtype, the time embedding, the tables, the layer norms and the residual
updates are in float32, as diffusers keeps them; a sum is rounded when it enters the stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_leangrpo import platform
from megatron_leangrpo.models.common.attention import (
    CoreAttention,
    HiddenNorm,
    SelfAttention,
    Stream,
    name_attentions,
    normalise_across_heads,
    split_qkv,
)
from megatron_leangrpo.models.common.embeddings import MLPEmbedder, sinusoid
from megatron_leangrpo.models.common.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    name_linears,
)
from megatron_leangrpo.models.common.mlp import MLP
from megatron_leangrpo.models.common.modulation import gated_residual
from megatron_leangrpo.models.common.norms import LayerNorm, scaled_norm
from megatron_leangrpo.models.common.transformer import ShardedTransformer, applied_to_own_tokens
from megatron_leangrpo.models.wan.conditioning import ImageEmbedding, VideoConditioning
from megatron_leangrpo.models.wan.config import PATCH, SINUSOID_WIDTH, WanConfig
from megatron_leangrpo.models.wan.positions import VideoRows, video_table
from megatron_leangrpo.parallel.mappings import copy_to_tensor_parallel
from megatron_leangrpo.parallel.tokens import TokenRows
from megatron_leangrpo.pipeline.stages import Stage
from megatron_leangrpo.pipeline.transport import Boundary, TensorSpec


class WanTransformer(ShardedTransformer):
    """The velocity of packed video latents, given their noise level and the prompt."""

    def __init__(self, wan_config: WanConfig, stage: Stage | None = None) -> None:
        config = wan_config.transformer_config()
        super().__init__(wan_config, config, stage)
        self.wan_config = wan_config

        if self.stage.is_first:
            self.build_embedders(wan_config, config)
        self.blocks = self.build_blocks(
            lambda: WanBlock(config, wan_config), 0, wan_config.num_layers
        )
        if self.stage.is_last:
            self.head = Head(config, wan_config)
        name_linears(self)
        name_attentions(self)

    def build_embedders(self, wan_config: WanConfig, config: TransformerConfig) -> None:
        """Build what comes before the blocks."""
        hidden, dtype, wide = config.hidden_size, config.params_dtype, wan_config.wide_dtype
        self.patch_embedding = torch.nn.Linear(PATCH * wan_config.in_channels, hidden, dtype=dtype)
        self.text_embedding = MLPEmbedder(
            wan_config.joint_attention_dim, hidden, dtype, partial(F.gelu, approximate="tanh")
        )
        self.time_embedding = MLPEmbedder(SINUSOID_WIDTH, hidden, wide)
        self.time_projection = torch.nn.Linear(hidden, 6 * hidden, dtype=dtype)
        if wan_config.image_dim:
            self.img_emb = ImageEmbedding(wan_config.image_dim, hidden, dtype, wide)
        # A rank's tokens may have noise levels of their own, so it embeds those alone.
        applied_to_own_tokens(self.time_embedding.parameters(), config)
        applied_to_own_tokens(self.time_projection.parameters(), config)

    def run_stage(
        self,
        state: tuple[torch.Tensor, ...],
        timestep: torch.Tensor,
        conditioning: VideoConditioning,
        grid: tuple[int, int, int],
    ) -> tuple[torch.Tensor, ...]:
        """Latents `[b, s, c]` to the velocity `[b, s, c]`, equal on all tensor-parallel ranks.

        A token is 1 x 2 x 2 latent positions with its channels in (c, 2, 2) order, FLUX's packing
        frame by frame; c is 4 * out_channels. `timestep` is in [0, 1] and in float32 whatever the
        model's dtype: `[b]`, or `[b, s]` where tokens are noisy to different degrees (Wan 2.2 5B
        from a picture). `grid` is (frames, rows, columns) of tokens, whose product is s.
        Between stages the state is `(x, e, e0, text)`, with a picture's embedding if there is one.
        """
        if self.stage.is_first:
            state = self.embed(*state, timestep, conditioning, grid)
        x, e, e0, *context = state

        rows = self.video_rows(grid, x.device)
        for block in self.blocks:
            x = self.run_block(block, x, e0, context, rows)
        if not self.stage.is_last:
            return x, e, e0, *context
        velocity = self.gather_without_pads(self.head(x, e), math.prod(grid))
        return (velocity.transpose(0, 1).contiguous(),)

    def state_before(
        self,
        block: int,
        rows: int,
        conditioning: VideoConditioning,
        grid: tuple[int, int, int],
        timestep_per_token: bool = False,
    ) -> Boundary:
        """The state that enters any block but the first, where timesteps are `[b]` or `[b, s]`."""
        hidden, dtype = self.wan_config.hidden_size, self.wan_config.params_dtype
        own = self.tokens_per_partition(grid)
        times = (own, rows) if timestep_per_token else (rows,)
        shapes = [(own, rows, hidden), (*times, hidden), (*times, 6, hidden)]
        pictures = [conditioning.image_embeds] if self.wan_config.image_dim else []
        for embeds in (conditioning.prompt_embeds, *pictures):
            shapes.append((embeds.shape[1], rows, hidden))
        return tuple(TensorSpec(shape, dtype) for shape in shapes)

    def tokens_per_partition(self, grid: tuple[int, int, int]) -> int:
        """Tokens of a rank, pads included."""
        return -(-math.prod(grid) // self.sequence_shards)

    def video_rows(self, grid: tuple[int, int, int], device: torch.device) -> VideoRows:
        """Where this rank's tokens are."""
        table = video_table(grid, self.wan_config.head_dim, self.wan_config.wide_dtype, device)
        rows = self.tokens_per_partition(grid) * self.sequence_shards
        context = platform.group_rank(self.cp_group), platform.group_size(self.cp_group)
        return VideoRows.of(table, rows, context)

    def embed(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        conditioning: VideoConditioning,
        grid: tuple[int, int, int],
    ) -> tuple[torch.Tensor, ...]:
        """`x`, this rank's tokens, `e` and `e0`, and what cross-attention sees."""
        assert math.prod(grid) == latents.shape[1], (grid, latents.shape)
        own = self.tokens_per_partition(grid)
        x = self.scatter_padded(self.embed_patches(latents, conditioning), own)
        if timestep.dim() == 2:
            timestep = self.scatter_padded(timestep.t().contiguous(), own)
        return x, *self.embed_time(timestep), *self.embed_prompt(conditioning)

    def embed_patches(self, latents: torch.Tensor, conditioning: VideoConditioning) -> torch.Tensor:
        """All tokens `[s, b, h]`."""
        if self.wan_config.in_channels > self.wan_config.out_channels:
            assert conditioning.image_latents is not None, "this model takes a picture's latents"
            latents = torch.cat((latents, conditioning.image_latents.to(latents.dtype)), dim=-1)
        latents = latents.to(self.config.params_dtype).transpose(0, 1).contiguous()
        return self.patch_embedding(latents)

    def embed_prompt(self, conditioning: VideoConditioning) -> tuple[torch.Tensor, ...]:
        """Text `[512, b, h]`, and a picture `[257, b, h]` where the model takes one.

        Their gradients are summed over ranks.
        """

        def embed(module: torch.nn.Module, embeds: torch.Tensor) -> torch.Tensor:
            embeds = embeds.to(self.config.params_dtype).transpose(0, 1).contiguous()
            # Once for all blocks; each rank's heads see a part of the gradient.
            return copy_to_tensor_parallel(module(embeds), self.tp_group)

        text = embed(self.text_embedding, conditioning.prompt_embeds)
        if not self.wan_config.image_dim:
            return (text,)
        assert conditioning.image_embeds is not None, "this model takes a picture's embedding"
        return text, embed(self.img_emb, conditioning.image_embeds)

    def embed_time(self, timestep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`e` `[..., h]` and `e0` `[..., 6, h]` for timesteps `[...]` in [0, 1]."""
        wide = self.wan_config.wide_dtype
        e = self.time_embedding(sinusoid(timestep.to(wide) * 1000, SINUSOID_WIDTH, wide))
        # diffusers rounds before it projects.
        e = e.to(self.config.params_dtype)
        return e, self.time_projection(F.silu(e)).unflatten(-1, (6, -1))


class WanBlock(MegatronModule):
    """Self-attention and MLP modulated by the noise level, attention to the text between them."""

    def __init__(self, config: TransformerConfig, wan_config: WanConfig) -> None:
        super().__init__(config)
        hidden, wide = config.hidden_size, wan_config.wide_dtype
        self.modulation = torch.nn.Parameter(torch.empty(1, 6, hidden, dtype=wide))
        self.self_attn = VideoAttention(config, wan_config)
        self.norm3 = LayerNorm(hidden, wide)
        self.cross_attn = CrossAttention(config, wan_config)
        self.ffn = MLP(config)
        applied_to_own_tokens((self.modulation, *self.norm3.parameters()), config)

    def forward(
        self,
        x: torch.Tensor,
        e0: torch.Tensor,
        context: Sequence[torch.Tensor],
        rows: VideoRows,
    ) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.modulation + e0).unbind(dim=-2)

        x = gated_residual(x, gate1, self.self_attn(scaled_norm(x, 1 + scale1, shift1), rows))
        x = x + self.cross_attn(self.norm3(x), rows.projected, *context)
        return gated_residual(x, gate2, self.ffn(scaled_norm(x, 1 + scale2, shift2)))


class VideoAttention(MegatronModule):
    """Attention of the video's tokens to one another."""

    def __init__(self, config: TransformerConfig, wan_config: WanConfig) -> None:
        super().__init__(config)
        self.head_dim = wan_config.head_dim
        recompute = wan_config.recompute_granularity == "selective"
        self.core_attention = SelfAttention(config, recompute)
        hidden, dtype = config.hidden_size, config.params_dtype
        self.linear_qkv = ColumnParallelLinear(hidden, 3 * hidden, config)
        self.q_rms = HiddenNorm(hidden, dtype)
        self.k_rms = HiddenNorm(hidden, dtype)
        self.linear_proj = RowParallelLinear(hidden, hidden, config)

    def forward(self, x: torch.Tensor, rows: VideoRows) -> torch.Tensor:
        qk, v = split_qkv(rows.projected.drop(self.linear_qkv(x)), self.head_dim)
        # Over all heads, so before the context-parallel ranks take some of them away.
        qk = normalise_across_heads(qk, self.q_rms, self.k_rms, table=rows.table)
        (out,) = self.core_attention([Stream(qk, v, rows.projected)], rows.attended)
        return self.linear_proj(*out)


class CrossAttention(MegatronModule):
    """Attention to the text and, in a sum, to a picture; both are whole on every rank."""

    def __init__(self, config: TransformerConfig, wan_config: WanConfig) -> None:
        super().__init__(config)
        self.head_dim = wan_config.head_dim
        self.core_attention = CoreAttention(wan_config.recompute_granularity == "selective")
        hidden, dtype = config.hidden_size, config.params_dtype
        whole_input = {"takes_all_tokens": True, "reduces_input_grad": False}
        self.linear_q = ColumnParallelLinear(hidden, hidden, config)
        self.linear_kv = ColumnParallelLinear(hidden, 2 * hidden, config, **whole_input)
        self.q_rms = HiddenNorm(hidden, dtype)
        self.k_rms = HiddenNorm(hidden, dtype)
        if wan_config.image_dim:
            self.added_linear_kv = ColumnParallelLinear(hidden, 2 * hidden, config, **whole_input)
            self.added_k_rms = HiddenNorm(hidden, dtype)
        self.linear_proj = RowParallelLinear(hidden, hidden, config)

    def forward(
        self,
        x: torch.Tensor,
        rows: TokenRows,
        text: torch.Tensor,
        image: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q = rows.drop(self.linear_q(x)).unflatten(-1, (-1, 1, self.head_dim))
        q = normalise_across_heads(q, self.q_rms).squeeze(-2)
        out = self.attend(q, self.linear_kv(text), self.k_rms)
        if image is not None:
            out = out + self.attend(q, self.added_linear_kv(image), self.added_k_rms)
        return self.linear_proj(rows.restore(out))

    def attend(self, q: torch.Tensor, kv: torch.Tensor, k_rms: HiddenNorm) -> torch.Tensor:
        """Attention of `q` to the tokens of a fused projection."""
        k, v = kv.unflatten(-1, (-1, 2, self.head_dim)).split(1, dim=-2)
        k = normalise_across_heads(k, k_rms).squeeze(-2)
        return self.core_attention(q, k, v.squeeze(-2))


class Head(MegatronModule):
    """The modulated projection of tokens to velocities."""

    def __init__(self, config: TransformerConfig, wan_config: WanConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.modulation = torch.nn.Parameter(torch.empty(1, 2, hidden, dtype=wan_config.wide_dtype))
        self.linear = torch.nn.Linear(
            hidden, PATCH * wan_config.out_channels, dtype=config.params_dtype
        )
        applied_to_own_tokens((self.modulation, *self.linear.parameters()), config)

    def forward(self, x: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        shift, scale = (self.modulation + e.unsqueeze(-2)).unbind(dim=-2)
        return self.linear(scaled_norm(x, 1 + scale, shift))
