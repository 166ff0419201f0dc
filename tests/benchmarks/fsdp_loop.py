# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Replay as DanceGRPO runs it on several ranks: sharded parameters, a reduction at every step.

FSDP2 shards each transformer block and the rest. Parameters are gathered for every forward and
every backward, and because the loop calls backward at every step, so are gradients reduced.
By FSDP2's default the root, what is in no block, stays gathered from a forward to its backward.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from megatron_leangrpo import platform
from megatron_leangrpo.grpo.experiment import Experiment
from tests.benchmarks.diffusers_loop import DiffusersLoop, MicroBatch


class ShardedLoop(DiffusersLoop):
    """The diffusers loop under FSDP2 with gradient checkpointing."""

    def __init__(self, experiment: Experiment, batches: Sequence[MicroBatch]) -> None:
        super().__init__(experiment, batches, checkpointing=True)
        ranks = torch.distributed.init_device_mesh(platform.device().type, (platform.world_size(),))
        # It warns that outputs are views: nothing here changes one in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        for block in (*self.model.transformer_blocks, *self.model.single_transformer_blocks):
            fully_shard(block, mesh=ranks)
        fully_shard(self.model, mesh=ranks)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                # gloo has no average; FSDP2 then divides the sum itself.
                module.set_force_sum_reduction_for_comms(True)

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of the last run, gathered on every rank (a collective)."""
        return {name: p.grad.full_tensor() for name, p in self.model.named_parameters()}
