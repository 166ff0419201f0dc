# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Ranks started from one process, for measurements that need no launcher."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_TIMEOUT_SECONDS = 120.0


def run_on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Every rank's return value of `function(*arguments)`, in rank order.

    `function` is found by its name in a fresh process, in which torch.distributed is already up:
    NCCL where there is a GPU for each rank, gloo otherwise.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            body = (rank, ranks, store, theirs, function, arguments)
            process = context.Process(target=_rank, args=body, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: Sequence[Connection]) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(pipes):
        left = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in values}
        ready = wait(left, timeout=_TIMEOUT_SECONDS)
        if not ready:
            raise RuntimeError(f"ranks {sorted(left.values())} were silent {_TIMEOUT_SECONDS:g} s")
        for pipe in ready:
            try:
                good, value = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {left[pipe]} of the measurement died") from None
            if not good:
                raise RuntimeError(f"rank {left[pipe]} of the measurement: {value}")
            values[left[pipe]] = value
    return [values[rank] for rank in range(len(pipes))]


def _rank(
    rank: int,
    ranks: int,
    store: str,
    result: Connection,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    try:
        os.environ["LOCAL_RANK"] = str(rank)
        import torch
        import torch.distributed as dist

        backend = "nccl" if torch.cuda.device_count() >= ranks else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(rank)
        torch.set_num_threads(1)
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=_TIMEOUT_SECONDS),
        )
        result.send((True, function(*arguments)))
    except Exception as error:
        result.send((False, f"{type(error).__name__}: {error}"))
