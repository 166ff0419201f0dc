# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Collectives with gradients: what goes forward, what comes back, on contiguous tensors and not."""

from __future__ import annotations

import pytest
import torch

from megatron_leangrpo import platform
from megatron_leangrpo.parallel import mappings

RANKS = 2


def _input(rank: int) -> torch.Tensor:
    return torch.arange(24, dtype=torch.float64).view(4, 2, 3) + 100 * rank


def _forward_and_backward(name: str, transposed: bool, *arguments) -> dict[str, torch.Tensor]:
    """Apply a mapping to a rank-dependent tensor and send a rank-dependent gradient back."""
    platform.initialize_distributed(RANKS)
    x = _input(platform.tp_rank())
    if transposed:
        # The same values in another memory order, which megatron 0.16 would leave unreduced.
        x = x.transpose(0, 2).contiguous().transpose(0, 2)
    x.requires_grad_()
    before = x.detach().clone()
    y = getattr(mappings, name)(x, platform.tp_group(), *arguments)
    gradient = torch.ones_like(y) * (platform.tp_rank() + 1)
    if transposed:
        gradient = gradient.transpose(0, 2).contiguous().transpose(0, 2)
    y.backward(gradient)
    assert torch.equal(x.detach(), before), "the input was changed in place"
    return {"output": y.detach(), "gradient": x.grad}


@pytest.mark.parametrize("transposed", [False, True])
def test_copy_sums_the_gradient(run_ranks, transposed):
    for rank, out in enumerate(
        run_ranks(RANKS, _forward_and_backward, "copy_to_tensor_parallel", transposed)
    ):
        assert torch.equal(out["output"], _input(rank))
        assert torch.equal(out["gradient"], torch.full((4, 2, 3), 3.0, dtype=torch.float64))


@pytest.mark.parametrize("transposed", [False, True])
def test_reduce_sums_and_passes_the_gradient(run_ranks, transposed):
    total = _input(0) + _input(1)
    for rank, out in enumerate(
        run_ranks(RANKS, _forward_and_backward, "reduce_from_tensor_parallel", transposed)
    ):
        assert torch.equal(out["output"], total)
        assert torch.equal(out["gradient"], torch.full((4, 2, 3), rank + 1.0, dtype=torch.float64))


def _summed_statistic() -> dict[str, torch.Tensor]:
    """A total over the ranks of which each rank uses its own multiple, as a norm over all heads."""
    platform.initialize_distributed(RANKS)
    group = platform.tp_group()
    x = _input(platform.tp_rank()).requires_grad_()
    total = mappings.reduce_from_tensor_parallel(x, group)
    total = mappings.copy_to_tensor_parallel(total, group)
    (total * (platform.tp_rank() + 1)).sum().backward()
    return {"output": total.detach(), "gradient": x.grad}


def test_reduce_then_copy_sums_forwards_and_backwards(run_ranks):
    for out in run_ranks(RANKS, _summed_statistic):
        assert torch.equal(out["output"], _input(0) + _input(1))
        assert torch.equal(out["gradient"], torch.full((4, 2, 3), 3.0, dtype=torch.float64))


@pytest.mark.parametrize("transposed", [False, True])
def test_partial_sums_are_scattered_and_entering_gathers_under_sequence_parallelism(
    run_ranks, transposed
):
    total = _input(0) + _input(1)
    own = [slice(0, 2), slice(2, 4)]
    leaving = run_ranks(RANKS, _forward_and_backward, "reduce_partial_sums", transposed, True)
    both = torch.cat((torch.ones(2, 2, 3), torch.full((2, 2, 3), 2.0))).double()
    for rank, out in enumerate(leaving):
        assert torch.equal(out["output"], total[own[rank]])
        assert torch.equal(out["gradient"], both)
    for out in run_ranks(RANKS, _forward_and_backward, "enter_tensor_parallel", transposed, True):
        assert torch.equal(out["output"], torch.cat((_input(0), _input(1))))
        assert torch.equal(out["gradient"], torch.full((4, 2, 3), 3.0, dtype=torch.float64))


def test_final_gather_keeps_only_our_part_of_a_duplicated_loss(run_ranks):
    for rank, out in enumerate(run_ranks(RANKS, _forward_and_backward, "gather_tokens", False)):
        assert torch.equal(out["output"], torch.cat((_input(0), _input(1))))
        assert torch.equal(out["gradient"], torch.full((4, 2, 3), rank + 1.0, dtype=torch.float64))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gathered_features_sum_gradients_only_when_ranks_hold_different_tokens(
    run_ranks, sequence_parallel
):
    outs = run_ranks(RANKS, _forward_and_backward, "gather_features", False, sequence_parallel)
    for rank, out in enumerate(outs):
        assert torch.equal(out["output"], torch.cat((_input(0), _input(1)), dim=-1))
        expected = 3.0 if sequence_parallel else rank + 1.0
        assert torch.equal(out["gradient"], torch.full((4, 2, 3), expected, dtype=torch.float64))


def test_one_rank_needs_no_group():
    x = _input(0)
    assert mappings.copy_to_tensor_parallel(x, None) is x
    assert mappings.reduce_from_tensor_parallel(x, None) is x
    assert mappings.gather_features(x, None, True) is x
