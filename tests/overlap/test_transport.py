# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A peer that is silent, dead or of another shape ends in an error that names rank and layer."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.overlap.schedule import Message
from megatron_leangrpo.overlap.transport import TorchTransport, TransportError
from tests.distributed.launcher import CONTEXT

# Long enough for both ranks to arrive on a busy machine, short enough for a test.
TIMEOUT_SECONDS = 3.0


def _transport() -> TorchTransport:
    platform.initialize_distributed(2)
    return TorchTransport(platform.tp_group(), "test", timeout_seconds=TIMEOUT_SECONDS)


def _exchange(transport: TorchTransport, rows: int, layer: str) -> None:
    other = 1 - transport.rank
    message = Message(other, transport.rank, other, other)
    transport.exchange(torch.ones(rows, 2), torch.empty(rows, 2), message, layer).wait()


def _error_of(call) -> tuple[str, float]:
    started = time.monotonic()
    try:
        call()
    except TransportError as error:
        return str(error), time.monotonic() - started
    return "", time.monotonic() - started


def _different_shapes(transport: TorchTransport) -> str:
    shape = (4 + transport.rank, 2)
    agreeing = _error_of(lambda: transport.check_agreement("fc1", (4, 2), torch.float32))[0]
    assert agreeing == ""
    return _error_of(lambda: transport.check_agreement("fc2", shape, torch.float32))[0]


def _different_layers(transport: TorchTransport) -> str:
    layer = f"proj{transport.rank}"
    return _error_of(lambda: transport.check_agreement(layer, (4, 2), torch.float32))[0]


def _disagreeing() -> tuple[str, str]:
    transport = _transport()
    return _different_shapes(transport), _different_layers(transport)


def test_different_shapes_and_layers_are_told_to_every_rank(run_ranks):
    shapes, layers = zip(*run_ranks(2, _disagreeing))
    first, second = shapes
    assert "rank 0 of 2, layer fc2" in first and "(4, 2)" in first and "(5, 2)" in first
    assert "rank 1 of 2, layer fc2" in second and "rank 0 has shape (4, 2)" in second
    for rank, error in enumerate(layers):
        assert f"layer proj{rank}" in error and "another layer" in error


def _messages_of_different_length() -> tuple[str, float]:
    transport = _transport()
    _exchange(transport, 4, "fc1")
    return _error_of(lambda: _exchange(transport, 4 + transport.rank, "fc2"))


def test_messages_that_do_not_fit_each_other_never_meet(run_ranks):
    for rank, (error, seconds) in enumerate(run_ranks(2, _messages_of_different_length)):
        assert f"rank {rank} of 2, layer fc2" in error
        assert seconds < 3 * TIMEOUT_SECONDS


def _silent_peer(answers: str) -> tuple[str, float]:
    transport = _transport()
    if transport.rank == 1:
        # Stay alive until the other has given up: it must be the silence that ends the wait.
        while not Path(answers).exists():
            time.sleep(0.05)
        return "", 0.0
    result = _error_of(lambda: _exchange(transport, 4, "fc1"))
    Path(answers).touch()
    return result


def test_a_silent_peer_ends_within_the_timeout(run_ranks, tmp_path):
    error, seconds = run_ranks(2, _silent_peer, str(tmp_path / "gave-up"))[0]
    assert "rank 0 of 2, layer fc1" in error and "rank 1" in error
    assert seconds < 3 * TIMEOUT_SECONDS


def _dying_peer(rank: int, store: str, answers: str) -> None:
    """Body of a process of its own: the launcher would end the survivor with the dead."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    transport = TorchTransport(dist.group.WORLD, "test", timeout_seconds=TIMEOUT_SECONDS)
    _exchange(transport, 4, "fc1")
    if rank == 1:
        os._exit(9)
    Path(answers).write_text(_error_of(lambda: _exchange(transport, 4, "fc2"))[0])
    os._exit(0)


def test_a_dead_peer_ends_in_an_error(tmp_path):
    answers = tmp_path / "error"
    arguments = [(rank, str(tmp_path / "store"), str(answers)) for rank in range(2)]
    processes = [CONTEXT.Process(target=_dying_peer, args=a) for a in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    error = answers.read_text()
    assert "rank 0 of 2, layer fc2" in error and "rank 1" in error
