# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Noise by identity: the same whatever the batch, the order, the dtype and the global RNG."""

import random

import numpy as np
import torch

from megatron_leangrpo.parallel.noise import (
    evaluation_noise,
    initial_noise,
    initial_noise_batch,
    step_noise,
    step_noise_batch,
)
from megatron_leangrpo.seeding import generator

SHAPE = (6, 4)


def test_a_draw_depends_on_its_identity_alone():
    first = step_noise(0, 3, 7, 2, 5, SHAPE)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    step_noise(0, 3, 7, 2, 4, SHAPE)
    assert torch.equal(step_noise(0, 3, 7, 2, 5, SHAPE), first)
    state = torch.random.get_rng_state()
    step_noise(0, 3, 7, 2, 5, SHAPE)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_noise_is_pinned():
    """A resumed run on another machine or version must see these numbers."""
    expected = torch.tensor([[1.951736569404602, 1.4706957340240479, 2.53941011428833]])
    torch.testing.assert_close(step_noise(0, 0, 0, 0, 0, (1, 3)), expected, rtol=0, atol=0)


def test_every_part_of_the_identity_matters_and_uses_do_not_collide():
    draws = [
        step_noise(*identity, SHAPE)
        for position in range(5)
        for value in (1, 2, -1)
        for identity in [[value if i == position else 0 for i in range(5)]]
    ]
    draws += [step_noise(0, 0, 0, 0, 0, SHAPE), step_noise(2**32, 0, 0, 0, 0, SHAPE)]
    draws += [initial_noise(0, 0, 0, index, SHAPE) for index in (None, 0, 1)]
    draws += [evaluation_noise(0, 0, 0, SHAPE), evaluation_noise(0, 0, 1, SHAPE)]
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == len(draws)


def test_batches_are_stacks_of_the_single_draws_in_any_order():
    samples = [(4, 0), (4, 1), (9, 0)]
    batch = step_noise_batch(1, 2, samples, 3, SHAPE)
    assert batch.shape == (3, *SHAPE)
    assert torch.equal(step_noise_batch(1, 2, samples[::-1], 3, SHAPE), batch.flip(0))
    assert torch.equal(batch[1], step_noise(1, 2, 4, 1, 3, SHAPE))
    shared = initial_noise_batch(1, 2, [(4, None), (4, None), (9, None)], SHAPE)
    assert torch.equal(shared[0], shared[1])
    assert not torch.equal(shared[0], shared[2])
    own = initial_noise_batch(1, 2, samples, SHAPE)
    assert torch.equal(own[2], initial_noise(1, 2, 9, 0, SHAPE))


def test_other_dtypes_see_the_same_numbers():
    single = step_noise(0, 1, 2, 3, 4, SHAPE)
    assert single.dtype == torch.float32
    assert torch.equal(step_noise(0, 1, 2, 3, 4, SHAPE, torch.float64), single.double())
    assert torch.equal(step_noise(0, 1, 2, 3, 4, SHAPE, torch.bfloat16), single.bfloat16())


def test_noise_is_standard_normal_and_independent_between_samples():
    draws = torch.stack([step_noise(0, 0, 0, sample, 0, (64, 64)) for sample in range(64)])
    flat = draws.flatten(1)
    count = flat.numel()
    # 5 standard errors each
    assert abs(flat.mean()) < 5 / count**0.5
    assert abs(flat.var() - 1) < 5 * (2 / count) ** 0.5
    correlation = torch.corrcoef(flat) - torch.eye(64)
    assert correlation.abs().max() < 6 / flat.shape[1] ** 0.5


def test_generators_differ_by_use():
    assert generator("a", 1).integers(2**60) != generator("b", 1).integers(2**60)
    assert generator("a", 1).integers(2**60) == generator("a", 1).integers(2**60)
    assert generator("a", 1).integers(2**60) != generator("a", 1, 0).integers(2**60)
