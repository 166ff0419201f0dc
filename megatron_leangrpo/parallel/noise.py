# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Noise that does not depend on how samples are laid out over ranks and micro-batches.

Every draw is full-shape, on the CPU, in float32, from a generator of its own; a run in another
dtype sees the same numbers, and a rank that holds a slice of a tensor slices after drawing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_leangrpo.seeding import generator


def _normal(rng: np.random.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(rng.standard_normal(tuple(shape), dtype=np.float32)).to(dtype)


def initial_noise(
    seed: int,
    iteration: int,
    prompt_id: int,
    sample_index: int | None,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Starting latent of one sample, or of the whole group when `sample_index` is None."""
    if sample_index is None:
        rng = generator("initial noise of a group", seed, iteration, prompt_id)
    else:
        rng = generator("initial noise", seed, iteration, prompt_id, sample_index)
    return _normal(rng, shape, dtype)


def step_noise(
    seed: int,
    iteration: int,
    prompt_id: int,
    sample_index: int,
    step: int,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Unit noise of one stochastic step of one sample."""
    rng = generator("step noise", seed, iteration, prompt_id, sample_index, step)
    return _normal(rng, shape, dtype)


def evaluation_noise(
    seed: int,
    prompt_id: int,
    sample_index: int,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Starting latent of an evaluation sample: the same every time, and no training draw."""
    return _normal(generator("evaluation noise", seed, prompt_id, sample_index), shape, dtype)


def initial_noise_batch(
    seed: int,
    iteration: int,
    samples: Sequence[tuple[int, int | None]],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`initial_noise` of each (prompt id, sample index or None), stacked to [b, *shape]."""
    return torch.stack(
        [initial_noise(seed, iteration, prompt, index, shape, dtype) for prompt, index in samples]
    )


def step_noise_batch(
    seed: int,
    iteration: int,
    samples: Sequence[tuple[int, int]],
    step: int,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`step_noise` of each (prompt id, sample index), stacked to [b, *shape]."""
    return torch.stack(
        [
            step_noise(seed, iteration, prompt, index, step, shape, dtype)
            for prompt, index in samples
        ]
    )
