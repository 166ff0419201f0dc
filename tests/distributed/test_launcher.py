# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The launcher itself: results, failures and hangs."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launcher import RankError


def _sum_of_ranks(offset: float) -> tuple[int, torch.Tensor]:
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return os.getpid(), value


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def _leave_rank_one_waiting() -> None:
    if dist.get_rank() == 1:
        dist.barrier()


def _die() -> None:
    os._exit(7)


def test_every_rank_returns_its_value_and_processes_are_reused(run_ranks):
    first = run_ranks(2, _sum_of_ranks, 0.5)
    second = run_ranks(2, _sum_of_ranks, offset=1.0)
    assert [value.item() for _, value in first] == [2.0, 2.0]
    assert [value.item() for _, value in second] == [3.0, 3.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]


def test_failure_of_one_rank_is_raised_with_its_traceback_and_the_next_call_works(run_ranks):
    with pytest.raises(RankError, match=r"rank 1 of 2 raised(.|\n)*rank one says no"):
        run_ranks(2, _fail_on_rank_one)
    assert run_ranks(2, _sum_of_ranks, 0.0)[0][1].item() == 1.0


def test_hang_and_sudden_death_end_with_a_message(run_ranks):
    with pytest.raises(RankError, match=r"ranks \[1\] gave no result in 1 s"):
        run_ranks(2, _leave_rank_one_waiting, timeout_seconds=1)
    with pytest.raises(RankError, match="died with exit code 7"):
        run_ranks(2, _die)
