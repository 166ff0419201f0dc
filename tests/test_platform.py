# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Process groups, and each thing that megatron-core needs to be told on a machine without CUDA."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_leangrpo import platform

host_only = pytest.mark.skipif(not platform.is_host(), reason="nothing is adapted with CUDA")


def test_one_process_needs_no_environment_and_no_port(single_process):
    assert (platform.rank(), platform.world_size()) == (0, 1)
    assert (platform.tp_size(), platform.dp_size(), platform.tp_rank(), platform.dp_rank()) == (
        1,
        1,
        0,
        0,
    )
    assert platform.is_logging_rank()
    value = torch.ones(2, device=platform.device())
    dist.all_reduce(value, group=platform.dp_group())
    assert value.tolist() == [1.0, 1.0]


def test_groups_answer_as_one_process_before_anything_is_initialised():
    assert not dist.is_initialized()
    assert platform.tp_group() is None and platform.dp_group() is None
    assert (platform.world_size(), platform.tp_size(), platform.dp_rank()) == (1, 1, 0)
    platform.destroy_distributed()


def test_more_processes_than_gpus_are_refused_by_number():
    platform.check_local_rank(3, devices=4)
    with pytest.raises(ValueError, match="LOCAL_RANK is 4, but this machine has 4 GPUs"):
        platform.check_local_rank(4, devices=4)


def test_tensor_parallel_size_that_does_not_divide_the_world_is_refused():
    message = (
        r"parallel\.tensor_model_parallel_size is 2, .* 1 process of this run; valid values: 1$"
    )
    with pytest.raises(ValueError, match=message):
        platform.initialize_distributed(tensor_model_parallel_size=2)
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"is 4, .* 6 processes of this run; .*: 1, 2, 3, 6$"):
        platform.check_layout(6, 4)


def _groups(sizes: list[int]) -> list[tuple[int, ...]]:
    seen = []
    for size in sizes:
        platform.initialize_distributed(size)
        total = torch.tensor([10 ** platform.rank()])
        dist.all_reduce(total, group=platform.tp_group())
        seen.append((platform.tp_size(), platform.tp_rank(), platform.dp_rank(), total.item()))
    return seen


def test_layout_can_change_in_a_running_world_and_neighbours_share_a_model(run_ranks):
    ranks = run_ranks(4, _groups, [1, 2, 4])
    assert ranks[0] == [(1, 0, 0, 1), (2, 0, 0, 11), (4, 0, 0, 1111)]
    assert ranks[3] == [(1, 0, 3, 1000), (2, 1, 1, 1100), (4, 3, 0, 1111)]


def _stages(context: int) -> tuple[int, int, list[int], list[int]]:
    platform.initialize_distributed(
        1, context_parallel_size=context, pipeline_model_parallel_size=2
    )
    groups = (platform.trajectory_group(), platform.stage_group())
    ranks = (dist.get_process_group_ranks(group) for group in groups)
    return platform.pp_rank(), platform.dp_rank(), *ranks


def test_stages_share_trajectories_with_the_first_one_in_front(run_ranks):
    # Data-parallel ranks are neighbours, so that stages are on the nodes that are furthest apart.
    assert run_ranks(4, _stages, 1) == [
        (0, 0, [0, 2], [0]),
        (0, 1, [1, 3], [1]),
        (1, 0, [0, 2], [2]),
        (1, 1, [1, 3], [3]),
    ]
    # megatron's model-parallel group would leave out the context.
    assert run_ranks(4, _stages, 2) == [
        (0, 0, [0, 1, 2, 3], [0, 1]),
        (0, 0, [0, 1, 2, 3], [0, 1]),
        (1, 0, [0, 1, 2, 3], [2, 3]),
        (1, 0, [0, 1, 2, 3], [2, 3]),
    ]


def _threads_after(layouts: int) -> int:
    for n in range(layouts):
        platform.initialize_distributed(1 + n % 2)
    return len(psutil.Process().threads())


def test_changing_the_layout_leaves_no_threads_behind(run_ranks):
    few, many = run_ranks(2, _threads_after, 2), run_ranks(2, _threads_after, 6)
    # The two layouts differ in groups; a leak would add about sixty threads for each change.
    assert all(abs(b - a) < 30 for a, b in zip(few, many))


def _wait_alone() -> float:
    platform.initialize_distributed(2, timeout_seconds=3)
    start = time.monotonic()
    if platform.rank() == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            dist.all_reduce(torch.ones(1), group=platform.tp_group())
    return time.monotonic() - start


def test_collective_that_waits_too_long_raises(run_ranks):
    assert 0.5 < run_ranks(2, _wait_alone)[0] < 30


_TWO_RANKS = """
import torch, torch.distributed as dist
from megatron_leangrpo import platform
platform.initialize_distributed(2, timeout_seconds=60)
value = torch.ones(1)
dist.all_reduce(value, group=platform.tp_group())
assert value.item() == 2.0 and platform.tp_rank() == platform.rank()
if platform.rank() == 1:
    raise SystemExit("rank one leaves")
dist.all_reduce(value, group=platform.tp_group())
"""


def test_launcher_environment_is_used_and_a_rank_that_leaves_ends_the_others():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", _TWO_RANKS],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert "rank one leaves" in errors[1]
    # Long before the timeout: the closed connection is noticed.
    assert ranks[0].returncode != 0 and "AssertionError" not in errors[0], errors[0]


@host_only
def test_megatron_allocates_on_the_cpu_and_waits_for_no_device():
    platform.adapt_megatron_to_host()
    assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
    torch.cuda.synchronize()
    platform.synchronize()


@host_only
def test_streams_do_nothing():
    platform.adapt_megatron_to_host()
    stream = torch.cuda.Stream(device=torch.cuda.current_device())
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.default_stream().wait_stream(stream)
        stream.synchronize()


@host_only
def test_host_mode_turns_requests_for_cuda_into_the_cpu_and_ends():
    with platform.host_mode():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.tensor([1.0], device=torch.device("cuda", 0)).device.type == "cpu"
        tensor = torch.ones(2)
        assert tensor.cuda() is tensor
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


@host_only
def test_host_mode_gives_the_type_names_that_megatron_compares():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with platform.host_mode():
        assert torch.ones(2).type() == "torch.cuda.FloatTensor"
        assert weight.type() == "torch.cuda.BFloat16Tensor"
        assert torch.ones(2, dtype=torch.float16).type() == "torch.cuda.HalfTensor"
        assert torch.ones(2, dtype=torch.float64).type() == "torch.DoubleTensor"
        assert torch.ones(2).type(torch.float64).dtype == torch.float64
    assert torch.ones(2).type() == "torch.FloatTensor"


def test_nothing_is_patched_when_cuda_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = (
        "current_device",
        "synchronize",
        "Stream",
        "stream",
        "current_stream",
        "default_stream",
    )
    originals = {name: object() for name in names}
    for name, original in originals.items():
        monkeypatch.setattr(torch.cuda, name, original)
    with platform.host_mode():
        platform.adapt_megatron_to_host()
        assert torch.ones(2).type() == "torch.FloatTensor"
    assert all(getattr(torch.cuda, name) is original for name, original in originals.items())
    assert platform.device() == torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _texts() -> tuple[str, str]:
    """What each rank gets of a text, and of an error, that rank 0 makes."""
    platform.initialize_distributed()

    def fail() -> str:
        raise ValueError("overlap.calibration is nothing")

    text = platform.text_from_first_rank(lambda: f"path of rank {platform.rank()} ∅")
    try:
        return text, platform.text_from_first_rank(fail)
    except ValueError as error:
        return text, str(error)


def test_what_rank_0_reads_or_cannot_read_is_known_to_all(run_ranks):
    for text, error in run_ranks(2, _texts):
        assert text == "path of rank 0 ∅"
        assert error == "overlap.calibration is nothing"
