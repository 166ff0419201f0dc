# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What every transformer here does with its tokens and its blocks."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from megatron_leangrpo import platform
from megatron_leangrpo.models.common.config import TransformerSettings
from megatron_leangrpo.parallel.mappings import gather_tokens, scatter_tokens
from megatron_leangrpo.parallel.tokens import pad_tokens
from megatron_leangrpo.pipeline.stages import Stage
from megatron_leangrpo.pipeline.transport import Boundary


class ShardedTransformer(MegatronModule):
    """A transformer, or the blocks of one pipeline stage.

    Under sequence parallelism each rank holds its share of the tokens between projections.
    """

    def __init__(
        self,
        settings: TransformerSettings,
        config: TransformerConfig,
        stage: Stage | None = None,
    ) -> None:
        """`stage` is this rank's where none is given."""
        super().__init__(config)
        if stage is None:
            assert platform.pp_size() == settings.pipeline_model_parallel_size
            stage = settings.stage(platform.pp_rank())
        self.stage = stage
        assert config.hidden_dropout == 0.0 and config.attention_dropout == 0.0
        self.tp_group = platform.tp_group()
        self.cp_group = platform.cp_group()
        assert platform.group_size(self.tp_group) == settings.tensor_model_parallel_size
        assert platform.group_size(self.cp_group) == settings.context_parallel_size
        self.recomputes_blocks = settings.recompute_granularity == "full"

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Any, grid: Any
    ) -> torch.Tensor:
        """The velocity of the whole transformer, see `run_stage`."""
        assert self.stage.stages == 1, "a stage of a pipeline has no velocity of its own"
        (velocity,) = self.run_stage((latents,), timestep, conditioning, grid)
        return velocity

    def run_stage(
        self,
        state: tuple[torch.Tensor, ...],
        timestep: torch.Tensor,
        conditioning: Any,
        grid: Any,
    ) -> tuple[torch.Tensor, ...]:
        """What this stage makes of `(latents,)`, or of what the stage before it made."""
        raise NotImplementedError

    def boundary(self, rows: int, conditioning: Any, grid: Any, **options: bool) -> Boundary:
        """What this stage hands to the next one for `rows` samples; empty on the last stage."""
        if self.stage.is_last:
            return ()
        return self.state_before(self.stage.blocks.stop, rows, conditioning, grid, **options)

    def received(self, rows: int, conditioning: Any, grid: Any, **options: bool) -> Boundary:
        """What this stage gets from the one before it; empty on the first stage."""
        if self.stage.is_first:
            return ()
        return self.state_before(self.stage.blocks.start, rows, conditioning, grid, **options)

    def state_before(self, block: int, rows: int, conditioning: Any, grid: Any) -> Boundary:
        """The state that enters a block, as this rank holds it; of `conditioning` only shapes."""
        raise NotImplementedError

    def build_blocks(
        self, build: Callable[[], torch.nn.Module], first: int, count: int
    ) -> torch.nn.ModuleList:
        """Those of a family's `count` blocks, the transformer's from `first` on, that are here.

        They have the names of the whole transformer, by which weights are found.
        """
        blocks = torch.nn.ModuleList()
        for n in range(count):
            if first + n in self.stage.blocks:
                blocks.add_module(str(n), build())
        return blocks

    @property
    def numbered_blocks(self) -> dict[int, torch.nn.Module]:
        """The blocks that are here, by their number in the whole transformer."""
        kinds = [child for child in self.children() if isinstance(child, torch.nn.ModuleList)]
        blocks = [block for kind in kinds for block in kind]
        return dict(zip(self.stage.blocks, blocks, strict=True))

    @property
    def sequence_shards(self) -> int:
        """Ranks over which the tokens are sharded between the projections.

        The context-parallel ranks have consecutive parts, each cut over its tensor-parallel ranks.
        """
        tensor = platform.group_size(self.tp_group) if self.config.sequence_parallel else 1
        return tensor * platform.group_size(self.cp_group)

    def scatter_padded(self, x: torch.Tensor, per_partition: int) -> torch.Tensor:
        """This rank's tokens of a whole stream `[s, ...]`, padded so that each rank has as many."""
        shards = self.sequence_shards
        if shards == 1:
            return x
        x = pad_tokens(x, per_partition * shards)
        # Every rank of the context computes its part alone: gradients of what comes before are
        # summed with those of the data-parallel ranks.
        x = x.chunk(platform.group_size(self.cp_group))[platform.group_rank(self.cp_group)]
        return scatter_tokens(x, self.tp_group) if self.config.sequence_parallel else x

    def gather_without_pads(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """The whole stream from every rank's tokens; every rank then computes the same loss."""
        if self.config.sequence_parallel:
            x = gather_tokens(x, self.tp_group)
        return gather_tokens(x, self.cp_group)[:tokens]

    def run_block(self, block: torch.nn.Module, *inputs: object) -> Any:
        """A block's output; under full recomputation the graph keeps the block's inputs alone."""
        if self.recomputes_blocks and torch.is_grad_enabled():
            # There is no dropout, so there is no random state to restore.
            return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
        return block(*inputs)


def applied_to_own_tokens(
    parameters: Iterable[torch.nn.Parameter], config: TransformerConfig
) -> None:
    """Have megatron sum the gradients of replicated parameters that see only this rank's tokens."""
    for parameter in parameters:
        parameter.sequence_parallel = config.sequence_parallel
