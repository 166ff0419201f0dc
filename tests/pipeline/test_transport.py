# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Messages of several dtypes arrive bit for bit; a stage that dies or is silent ends the others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_leangrpo.overlap.transport import TransportError
from megatron_leangrpo.pipeline.order import Item, same_windows
from megatron_leangrpo.pipeline.transport import (
    Alone,
    StageTransport,
    TensorSpec,
    pack,
    unpack,
)
from tests.distributed.launcher import CONTEXT

# Long enough for three processes to arrive on a busy machine.
TIMEOUT_SECONDS = 20.0


def test_a_message_holds_tensors_of_several_dtypes_without_their_graphs():
    tensors = (
        torch.randn(3, 5, requires_grad=True) * 2,
        torch.randn(1, 1, 3).to(torch.bfloat16),
        torch.randn(2, 2, dtype=torch.float64).t(),
        torch.arange(7),
        torch.empty(0, 4),
    )
    boundary = tuple(TensorSpec.of(tensor) for tensor in tensors)
    message = pack(tensors, boundary)
    assert message.dtype == torch.uint8 and not message.requires_grad
    for tensor, arrived in zip(tensors, unpack(message, boundary)):
        assert torch.equal(tensor, arrived) and arrived.dtype == tensor.dtype
        assert arrived.is_leaf and not arrived.requires_grad


def test_what_a_stage_returns_must_be_what_its_boundary_says():
    boundary = (TensorSpec((2, 3), torch.float32),)
    with pytest.raises(AssertionError, match="boundary"):
        pack((torch.zeros(3, 2),), boundary)


def test_alone_latents_come_back_at_once():
    transport, item = Alone(), Item(1, 0)
    latents = torch.randn(2, requires_grad=True)
    transport.send("latents", (latents,), (TensorSpec.of(latents),), item)
    (arrived,) = transport.receive("latents", item)
    assert torch.equal(arrived, latents) and not arrived.requires_grad


def _stage(rank: int, folder: str, problem: str) -> None:
    """Body of a process of its own: the launcher would end the survivors with the dead."""
    from tests.pipeline import toy

    store = dist.FileStore(str(Path(folder, "store")), 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    timeout = TIMEOUT_SECONDS if problem == "dies" else 2.0
    transport = StageTransport(dist.group.WORLD, timeout_seconds=timeout)

    def fail(item: Item) -> None:
        if item != Item(1, 0):
            return
        if problem == "dies":
            os._exit(9)
        # Alive until the others have given up: it must be the silence that ends their wait.
        while len(list(Path(folder).glob("error *"))) < 2:
            time.sleep(0.05)
        os._exit(0)

    started = time.monotonic()
    try:
        before = fail if rank == 1 else None
        toy.run_stage(transport, (2, 2, 2), "reweight", same_windows(3, range(3)), before)
    except TransportError as error:
        text = f"{time.monotonic() - started}\n{error}"
        Path(folder, f"writing {rank}").write_text(text)
        os.replace(Path(folder, f"writing {rank}"), Path(folder, f"error {rank}"))
    # As a command does: at once, without waiting for anybody.
    os._exit(0)


@pytest.mark.parametrize("problem", ["dies", pytest.param("is silent", marks=pytest.mark.slow)])
def test_a_stage_that_fails_ends_all_others_with_stage_and_item(tmp_path, problem):
    processes = [
        CONTEXT.Process(target=_stage, args=(rank, str(tmp_path), problem)) for rank in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    for rank in (0, 2):
        seconds, error = (tmp_path / f"error {rank}").read_text().split("\n", 1)
        assert float(seconds) < 2 * TIMEOUT_SECONDS
        assert f"pipeline stage {rank} of 3" in error
        assert "stage 1" in error and "of trajectory" in error
