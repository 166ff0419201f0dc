# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Sampling from the first latents to the last in one go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_leangrpo.diffusion.sampler import Sampling


def rollout(
    policy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *arguments: Any, **options: Any
) -> torch.Tensor:
    """The result of `Sampling(*arguments, **options)` by `policy(x, timestep)`, without graphs."""
    sampling = Sampling(*arguments, **options)
    with torch.no_grad():
        while not sampling.is_done:
            sampling.advance(policy(sampling.x, sampling.timestep))
    return sampling.result
