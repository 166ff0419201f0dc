# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""FLUX from top to bottom, on megatron-core's tensor- and sequence-parallel layers.

Letters: s tokens, b samples, h hidden features; tensors are `[s, b, h]` inside. `img`, `txt` and
`vec` are the image tokens, the text tokens and the conditioning vector of the paper's figure.
Under sequence parallelism the residual streams hold this rank's share of the tokens; every
projection that enters a block gathers them, every one that leaves it scatters them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_leangrpo import platform
from megatron_leangrpo.models.common.attention import (
    HeadNorm,
    SelfAttention,
    Stream,
    name_attentions,
    normalise_and_rotate,
    split_qkv,
)
from megatron_leangrpo.models.common.embeddings import MLPEmbedder, sinusoid
from megatron_leangrpo.models.common.linear import (
    ColumnParallelLinear,
    JoinedRowParallelLinear,
    RowParallelLinear,
    name_linears,
    project_together,
)
from megatron_leangrpo.models.common.mlp import MLP
from megatron_leangrpo.models.common.modulation import Modulation, gated_residual, modulated_norm
from megatron_leangrpo.models.common.transformer import ShardedTransformer, applied_to_own_tokens
from megatron_leangrpo.models.flux.config import SINUSOID_WIDTH, FluxConfig
from megatron_leangrpo.models.flux.positions import Positions
from megatron_leangrpo.parallel.tokens import TokenLayout
from megatron_leangrpo.pipeline.stages import Stage
from megatron_leangrpo.pipeline.transport import Boundary, TensorSpec

if TYPE_CHECKING:
    from megatron_leangrpo.conditioning.encoders import Conditioning


class FluxTransformer(ShardedTransformer):
    """The velocity of packed latents, given their noise level and the prompt."""

    def __init__(self, flux_config: FluxConfig, stage: Stage | None = None) -> None:
        config = flux_config.transformer_config()
        super().__init__(flux_config, config, stage)
        self.flux_config = flux_config

        if self.stage.is_first:
            hidden, dtype = flux_config.hidden_size, flux_config.params_dtype
            self.img_in = torch.nn.Linear(flux_config.in_channels, hidden, dtype=dtype)
            self.txt_in = torch.nn.Linear(flux_config.joint_attention_dim, hidden, dtype=dtype)
            self.time_in = MLPEmbedder(SINUSOID_WIDTH, hidden, dtype)
            self.vector_in = MLPEmbedder(flux_config.pooled_projection_dim, hidden, dtype)
            if flux_config.guidance_embeds:
                self.guidance_in = MLPEmbedder(SINUSOID_WIDTH, hidden, dtype)

        double, single = flux_config.num_double_blocks, flux_config.num_single_blocks
        self.double_blocks = self.build_blocks(
            lambda: DoubleStreamBlock(config, flux_config), 0, double
        )
        self.single_blocks = self.build_blocks(
            lambda: SingleStreamBlock(config, flux_config), double, single
        )
        if self.stage.is_last:
            self.final_layer = LastLayer(config, flux_config.out_channels)
        name_linears(self)
        name_attentions(self)

    def run_stage(
        self,
        state: tuple[torch.Tensor, ...],
        timestep: torch.Tensor,
        conditioning: Conditioning,
        grid: tuple[int, int],
    ) -> tuple[torch.Tensor, ...]:
        """Latents `[b, s, c]` to the velocity `[b, s, c]`, equal on all tensor-parallel ranks.

        `timestep` is `[b]` in [0, 1]; `grid` is (rows, columns) of tokens, whose product is s.
        Between stages the state is `(img, txt, vec)`, from the last double block on
        `(tokens, vec)`.
        """
        layout = self.token_layout(conditioning, grid)
        positions = self.positions(layout, grid, state[0].device)

        if self.stage.is_first:
            state = self.embed(*state, timestep, conditioning, layout)
        if self.stage.is_first or self.stage.blocks.start < self.flux_config.num_double_blocks:
            img, txt, vec = state
            for block in self.double_blocks:
                img, txt = self.run_block(block, img, txt, vec, positions)
            if self.stage.blocks.stop < self.flux_config.num_double_blocks:
                return img, txt, vec
            tokens = torch.cat((txt, img))
        else:
            tokens, vec = state

        for block in self.single_blocks:
            tokens = self.run_block(block, tokens, vec, positions)
        if not self.stage.is_last:
            return tokens, vec
        img = tokens[layout.text_per_partition :]
        velocity = self.gather_without_pads(self.final_layer(img, vec), layout.image)
        return (velocity.transpose(0, 1).contiguous(),)

    def state_before(
        self, block: int, rows: int, conditioning: Conditioning, grid: tuple[int, int]
    ) -> Boundary:
        layout = self.token_layout(conditioning, grid)
        hidden, dtype = self.flux_config.hidden_size, self.flux_config.params_dtype
        image, text = layout.image_per_partition, layout.text_per_partition
        in_streams = block < self.flux_config.num_double_blocks
        counts = (image, text) if in_streams else (text + image,)
        streams = tuple(TensorSpec((count, rows, hidden), dtype) for count in counts)
        return *streams, TensorSpec((rows, hidden), dtype)

    def token_layout(self, conditioning: Conditioning, grid: tuple[int, int]) -> TokenLayout:
        """How text and image tokens are cut over this rank and its neighbours."""
        text = conditioning.prompt_embeds.shape[1]
        return TokenLayout(text, grid[0] * grid[1], self.sequence_shards)

    def positions(
        self, layout: TokenLayout, grid: tuple[int, int], device: torch.device
    ) -> Positions:
        """Where this rank's tokens are."""
        axes, dtype = self.flux_config.axes_dims_rope, self.flux_config.params_dtype
        context = platform.group_rank(self.cp_group), platform.group_size(self.cp_group)
        return Positions.of(layout, grid, axes, dtype, device, context)

    def embed(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        conditioning: Conditioning,
        layout: TokenLayout,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`img` and `txt`, this rank's tokens, and `vec`."""
        dtype = self.flux_config.params_dtype
        assert layout.image == latents.shape[1], (layout, latents.shape)
        img = self.img_in(latents.to(dtype).transpose(0, 1).contiguous())
        txt = self.txt_in(conditioning.prompt_embeds.to(dtype).transpose(0, 1).contiguous())
        img = self.scatter_padded(img, layout.image_per_partition)
        txt = self.scatter_padded(txt, layout.text_per_partition)
        return img, txt, self.embed_conditioning(timestep, conditioning)

    def embed_conditioning(
        self, timestep: torch.Tensor, conditioning: Conditioning
    ) -> torch.Tensor:
        """The conditioning vector `[b, h]`, with the SiLU that every modulation starts with."""
        dtype = self.flux_config.params_dtype
        # diffusers rounds to the model's dtype before it multiplies; in bfloat16 3.5 becomes 3504.
        vec = self.time_in(sinusoid(timestep.to(dtype) * 1000, SINUSOID_WIDTH, dtype))
        if self.flux_config.guidance_embeds:
            assert conditioning.guidance is not None, "this model takes a guidance scale"
            guidance = conditioning.guidance.to(dtype) * 1000
            vec = vec + self.guidance_in(sinusoid(guidance, SINUSOID_WIDTH, dtype))
        return F.silu(vec + self.vector_in(conditioning.pooled.to(dtype)))


class DoubleStreamBlock(MegatronModule):
    """Image and text have weights of their own and attend to each other."""

    def __init__(self, config: TransformerConfig, flux_config: FluxConfig) -> None:
        super().__init__(config)
        self.img_mod = Modulation(config, chunks=6)
        self.txt_mod = Modulation(config, chunks=6)
        self.attn = JointAttention(config, flux_config)
        self.img_mlp = MLP(config)
        self.txt_mlp = MLP(config)

    def forward(
        self, img: torch.Tensor, txt: torch.Tensor, vec: torch.Tensor, positions: Positions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        img_shift1, img_scale1, img_gate1, img_shift2, img_scale2, img_gate2 = self.img_mod(vec)
        txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = self.txt_mod(vec)

        img_attn, txt_attn = self.attn(
            modulated_norm(img, img_shift1, img_scale1),
            modulated_norm(txt, txt_shift1, txt_scale1),
            positions,
        )
        img = gated_residual(img, img_gate1, img_attn)
        txt = gated_residual(txt, txt_gate1, txt_attn)

        img_update = self.img_mlp(modulated_norm(img, img_shift2, img_scale2))
        txt_update = self.txt_mlp(modulated_norm(txt, txt_shift2, txt_scale2))
        return (
            gated_residual(img, img_gate2, img_update),
            gated_residual(txt, txt_gate2, txt_update),
        )


class JointAttention(MegatronModule):
    """Attention over text and image tokens, each stream with projections and norms of its own."""

    def __init__(self, config: TransformerConfig, flux_config: FluxConfig) -> None:
        super().__init__(config)
        self.head_dim = head_dim = flux_config.head_dim
        recompute = flux_config.recompute_granularity == "selective"
        self.core_attention = SelfAttention(config, recompute)
        hidden, dtype = config.hidden_size, config.params_dtype
        self.linear_qkv = ColumnParallelLinear(hidden, 3 * hidden, config)
        self.added_linear_qkv = ColumnParallelLinear(hidden, 3 * hidden, config)
        self.q_layernorm = HeadNorm(head_dim, dtype)
        self.k_layernorm = HeadNorm(head_dim, dtype)
        self.added_q_layernorm = HeadNorm(head_dim, dtype)
        self.added_k_layernorm = HeadNorm(head_dim, dtype)
        self.linear_proj = RowParallelLinear(hidden, hidden, config)
        self.added_linear_proj = RowParallelLinear(hidden, hidden, config)

    def forward(
        self, img: torch.Tensor, txt: torch.Tensor, positions: Positions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        img_rows, txt_rows = positions.projected_image, positions.projected_text
        img_qk, img_v = split_qkv(img_rows.drop(self.linear_qkv(img)), self.head_dim)
        txt_qk, txt_v = split_qkv(txt_rows.drop(self.added_linear_qkv(txt)), self.head_dim)
        img_qk = normalise_and_rotate(img_qk, self.q_layernorm, self.k_layernorm, positions.image)
        # Text is all at the origin, which rotates nothing.
        txt_qk = normalise_and_rotate(txt_qk, self.added_q_layernorm, self.added_k_layernorm, None)

        streams = [Stream(txt_qk, txt_v, txt_rows), Stream(img_qk, img_v, img_rows)]
        txt_attn, img_attn = self.core_attention(streams, positions.attended_paired)
        return self.linear_proj(*img_attn), self.added_linear_proj(*txt_attn)


class SingleStreamBlock(MegatronModule):
    """Attention and MLP side by side over the joined tokens: one gather in, one reduction out."""

    def __init__(self, config: TransformerConfig, flux_config: FluxConfig) -> None:
        super().__init__(config)
        self.head_dim = flux_config.head_dim
        hidden, ffn, dtype = config.hidden_size, config.ffn_hidden_size, config.params_dtype
        shared_input = {"shares_input": True}
        self.modulation = Modulation(config, chunks=3)
        self.linear_qkv = ColumnParallelLinear(hidden, 3 * hidden, config, **shared_input)
        self.linear_fc1 = ColumnParallelLinear(hidden, ffn, config, **shared_input)
        self.q_layernorm = HeadNorm(self.head_dim, dtype)
        self.k_layernorm = HeadNorm(self.head_dim, dtype)
        recompute = flux_config.recompute_granularity == "selective"
        self.core_attention = SelfAttention(config, recompute)
        self.linear_out = JoinedRowParallelLinear(hidden, ffn, hidden, config)

    def forward(
        self, tokens: torch.Tensor, vec: torch.Tensor, positions: Positions
    ) -> torch.Tensor:
        shift, scale, gate = self.modulation(vec)
        x = modulated_norm(tokens, shift, scale)
        qkv, mlp = project_together(x, [self.linear_qkv, self.linear_fc1], self.config)

        rows = positions.projected_joined
        qk, v = split_qkv(rows.drop(qkv), self.head_dim)
        qk = normalise_and_rotate(qk, self.q_layernorm, self.k_layernorm, positions.joined)
        stream = Stream(qk, v, rows)
        ((attn, later),) = self.core_attention([stream], positions.attended_joined)
        mlp = F.gelu(mlp, approximate="tanh")

        return gated_residual(tokens, gate, self.linear_out(attn, mlp, later))


class LastLayer(MegatronModule):
    """The modulated projection of image tokens to velocities."""

    def __init__(self, config: TransformerConfig, out_channels: int) -> None:
        super().__init__(config)
        self.modulation = Modulation(config, chunks=2)
        self.linear = torch.nn.Linear(config.hidden_size, out_channels, dtype=config.params_dtype)
        applied_to_own_tokens(self.linear.parameters(), config)

    def forward(self, img: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
        # diffusers' order; the original model's is shift, scale.
        scale, shift = self.modulation(vec)
        return self.linear(modulated_norm(img, shift, scale))
