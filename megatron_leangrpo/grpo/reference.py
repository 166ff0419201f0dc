# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The reference policy of a KL term: the weights the run started from, or the adapters' base."""

import copy
from typing import Any

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.grpo.policy import Policy
from megatron_leangrpo.models.experts import transformers_of
from megatron_leangrpo.pipeline.transport import Boundary


def reference_of(policy: Policy, offload: bool = False) -> Policy:
    """The reference of a policy before its first update.

    Where adapters are trained it is the policy's own base: no weights are copied.
    """
    # Planning imports this module and no megatron-core.
    from megatron_leangrpo.models.common.lora import has_adapters

    if has_adapters(policy.model):
        return policy.over(WithoutAdapters(policy.model))
    return frozen_copy(policy, offload)


class WithoutAdapters:
    """The base of an adapted model as a model of its own; no graph runs through it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __call__(self, *inputs: Any, **named: Any) -> torch.Tensor:
        from megatron_leangrpo.models.common.lora import adapters_off

        with torch.no_grad(), adapters_off(self.model):
            return self.model(*inputs, **named)

    def run_stage(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """A pipeline stage of the base."""
        from megatron_leangrpo.models.common.lora import adapters_off

        with torch.no_grad(), adapters_off(self.model):
            return self.model.run_stage(*inputs)

    def boundary(self, *inputs: Any) -> Boundary:
        """What passes between stages is as wide without adapters."""
        return self.model.boundary(*inputs)

    def received(self, *inputs: Any) -> Boundary:
        """What passes between stages is as wide without adapters."""
        return self.model.received(*inputs)


def frozen_copy(policy: Policy, offload: bool = False) -> Policy:
    """Return a policy over a copy of the weights that never changes and takes no gradient.

    With `offload` the copy lives in host memory; each block is fetched before its forward, on CUDA
    while the block before it runs.

    Take it before the model is wrapped for data parallelism, so that it owns no gradient buffers.
    """
    # Process groups cannot be copied, and the copy is to work in the same ones.
    attributes = (value for module in policy.model.modules() for value in vars(module).values())
    shared = {id(value): value for value in attributes if isinstance(value, dist.ProcessGroup)}
    model: torch.nn.Module = copy.deepcopy(policy.model, shared)
    model.requires_grad_(False).eval()
    if offload:
        from diffusers.hooks import apply_group_offloading

        for transformer in transformers_of(model):
            is_cut = transformer.stage.stages > 1
            if is_cut:
                # The hooks go around `forward`, and a stage of a pipeline is run by another name.
                transformer.forward = transformer.run_stage
            apply_group_offloading(
                transformer,
                onload_device=platform.device(),
                num_blocks_per_group=1,
                use_stream=not platform.is_host(),
            )
            if is_cut:
                transformer.run_stage = transformer.forward
    return policy.over(model)
