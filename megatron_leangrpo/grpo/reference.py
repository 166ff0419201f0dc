# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The reference policy of a KL term: a frozen copy of the weights the run started from."""

import copy

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.grpo.policy import Policy
from megatron_leangrpo.models.experts import transformers_of


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
            apply_group_offloading(
                transformer,
                onload_device=platform.device(),
                num_blocks_per_group=1,
                use_stream=not platform.is_host(),
            )
    return policy.over(model)
