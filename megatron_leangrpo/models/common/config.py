# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What the configuration of every model says, and what megatron-core wants to know of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from megatron_leangrpo.overlap.settings import OverlapSettings
from megatron_leangrpo.pipeline.stages import Stage, balanced_split, check_split

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


RECOMPUTE_GRANULARITIES = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class TransformerSettings:
    """A model's inputs, and how a run computes and shards it; each model adds its own sizes."""

    in_channels: int
    """Channels of a latent token, and of its velocity."""
    joint_attention_dim: int
    """Width of the prompt embeddings (T5)."""
    spatial_stride: int = 8
    """Pixels a side that the VAE makes one latent position; 2 x 2 positions are a token."""
    temporal_stride: int | None = None
    """Frames that become one latent frame, after the first; None for a model of pictures."""
    experts: int = 1
    """Transformers of one policy: with two, the first one denoises what is noisier than the
    boundary, the second one the rest (Wan 2.2 A14B)."""
    expert_boundary: float | None = None
    """Noise level from which the first of two experts runs."""
    guidance_embeds: bool = False
    """Whether the guidance scale is an input (it is in FLUX.1-dev, not in schnell)."""
    recompute_granularity: str = "none"
    """none keeps all activations, selective recomputes attention, full recomputes every block."""
    params_dtype: torch.dtype = torch.float32
    """Dtype of weights and activations."""
    context_parallel_size: int = 1
    """Ranks over which tokens are sharded outside attention and heads inside (Ulysses)."""
    tensor_model_parallel_size: int = 1
    """Ranks over which heads and features are sharded."""
    pipeline_model_parallel_size: int = 1
    """Stages over which the blocks are split."""
    pipeline_split: tuple[int, ...] | Literal["memory"] | None = None
    """Blocks of each stage; None balances their number, memory their weights. A run balances their
    time, for which it needs to know more than the model."""
    sequence_parallel: bool = False
    """Shard the tokens between the linears over the same ranks; without effect on one rank."""
    overlap: OverlapSettings = field(default_factory=OverlapSettings)
    """How the collectives of the linears run beside their products."""

    @property
    def wide_dtype(self) -> torch.dtype:
        """float32, or the model's dtype where that is wider."""
        return torch.promote_types(self.params_dtype, torch.float32)

    @property
    def transformer_folders(self) -> tuple[str, ...]:
        """The folders of a diffusers pipeline that hold the weights."""
        return ("transformer", "transformer_2")[: self.experts]

    @property
    def num_blocks(self) -> int:
        """Blocks of the transformer, between which it may be cut."""
        return len(self.block_weights)

    @property
    def block_weights(self) -> tuple[int, ...]:
        """Weights of every block, but for biases and norms."""
        raise NotImplementedError

    def stage(self, index: int) -> Stage:
        """A stage of the pipeline; ``ValueError`` for a split that cannot be."""
        stages, split = self.pipeline_model_parallel_size, self.pipeline_split
        if split is None:
            # Of what is left over the last stages, which hold the fewest graphs, have one more.
            split = balanced_split([1.0] * self.num_blocks, stages)
        elif split == "memory":
            split = balanced_split(self.block_weights, stages)
        else:
            split = check_split(split, stages, self.num_blocks)
        return Stage.of(split, index)

    @property
    def pooled_projection_dim(self) -> int:
        """Width of the pooled prompt embedding; 0 for a model that takes none."""
        return 0

    @property
    def latent_channels(self) -> int:
        """Numbers of a token's velocity, and of the latents that it moves."""
        return self.in_channels

    @property
    def takes_picture(self) -> bool:
        """Whether a sample starts from a picture, which no prompt file has yet."""
        return False

    @property
    def pixels_per_token(self) -> int:
        """Pixels a side of one token."""
        return 2 * self.spatial_stride

    def token_grid(self, frames: int, rows: int, columns: int) -> tuple[int, ...]:
        """Tokens as (rows, columns), in a model of videos (latent frames, rows, columns).

        ``ValueError`` for a number of frames that cannot be.
        """
        if self.temporal_stride is None:
            if frames != 1:
                raise ValueError(
                    f"sampling.num_frames = {frames}: this model makes pictures; valid: 1"
                )
            return rows, columns
        groups, rest = divmod(frames - 1, self.temporal_stride)
        if rest:
            below = groups * self.temporal_stride + 1
            raise ValueError(
                f"sampling.num_frames = {frames}: must be a multiple of {self.temporal_stride} and "
                f"one more; nearest valid: {below} or {below + self.temporal_stride}"
            )
        return groups + 1, rows, columns

    def check_layout(self, hidden: int, heads: int) -> None:
        """Raise ``ValueError`` for sizes, recomputation or a layout that cannot be."""
        self._check_experts()
        self.stage(0)
        if hidden % heads:
            raise ValueError(f"hidden_size {hidden} is not a multiple of {heads} attention heads")
        if self.recompute_granularity not in RECOMPUTE_GRANULARITIES:
            raise ValueError(
                f"model.recompute_granularity is {self.recompute_granularity!r}; "
                f"valid values: {', '.join(RECOMPUTE_GRANULARITIES)}"
            )
        tp = self.tensor_model_parallel_size
        if tp < 1 or heads % tp:
            valid = [n for n in range(1, heads + 1) if heads % n == 0]
            raise ValueError(
                f"parallel.tensor_model_parallel_size is {tp}, which does not divide the {heads} "
                f"attention heads of this model; valid values: {', '.join(map(str, valid))}"
            )

    def _check_experts(self) -> None:
        boundary = self.expert_boundary
        if boundary is not None and not 0 <= boundary <= 1:
            raise ValueError(f"model.expert_boundary = {boundary}: must be between 0 and 1")
        if boundary is not None and self.experts == 1:
            raise ValueError(
                f"model.expert_boundary = {boundary}: this model has one transformer and no "
                "boundary; leave it unset"
            )
        if boundary is None and self.experts > 1:
            raise ValueError(
                "model.expert_boundary is not set, and the pipeline's model_index.json has no "
                "boundary_ratio; such as 0.875"
            )

    def megatron_config(self, **sizes: Any) -> TransformerConfig:
        """For megatron-core's layers, data-parallel wrapper and optimizer.

        `sizes` are num_layers, hidden_size, num_attention_heads, ffn_hidden_size and whatever else
        of `TransformerConfig` a model needs.
        """
        from megatron.core.transformer.transformer_config import TransformerConfig

        from megatron_leangrpo.overlap import weight_grad

        config = TransformerConfig(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            context_parallel_size=self.context_parallel_size,
            sequence_parallel=self.sequence_parallel and self.tensor_model_parallel_size > 1,
            params_dtype=self.params_dtype,
            bf16=self.params_dtype == torch.bfloat16,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            # Weights are filled by the loader or drawn by name, on torch's default device.
            use_cpu_initialization=True,
            perform_initialization=False,
            # The objective is already divided by the global number of samples and steps.
            calculate_per_token_loss=True,
            gradient_accumulation_fusion=weight_grad.fuses_here(),
            **sizes,
        )
        config.overlap = self.overlap
        return config
