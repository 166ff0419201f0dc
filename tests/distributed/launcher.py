# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Gloo ranks for tests: real processes, reused until a test asks for another number of them."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

# Longer than any honest test step on a busy machine, shorter than a person's patience.
DEFAULT_TIMEOUT_SECONDS = 120.0

# A rank is a fork of a process without threads that has imported what takes seconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "diffusers.models.transformers.transformer_flux",
        "diffusers.models.transformers.transformer_wan",
        "jsonargparse.typing",
        "megatron.core.dist_checkpointing",
        "megatron.core.distributed",
        "megatron.core.optimizer",
        "megatron.core.parallel_state",
        "megatron.core.tensor_parallel",
        "megatron_leangrpo.grpo.trainer",
        "megatron_leangrpo.models.flux.family",
        "megatron_leangrpo.models.flux.model",
        "megatron_leangrpo.models.wan.family",
        "megatron_leangrpo.models.wan.model",
        "megatron_leangrpo.overlap.linear",
        "megatron_leangrpo.overlap.ulysses",
        "typeshed_client.parser",
    ]
)


class RankError(AssertionError):
    """A rank raised, died or hung."""


def _import_from(name: str, path: str) -> ModuleType:
    """The test module `name`, whatever pytest's import mode put (or did not put) on sys.path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _serve(rank: int, world_size: int, store_path: str, jobs: Connection) -> None:
    """Body of one rank: join the gloo world, then run jobs until killed or left alone."""
    import torch
    import torch.distributed as dist

    # What was imported stays: collecting garbage need not look at it.
    gc.freeze()
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    with suppress(EOFError):
        while True:
            job = jobs.recv()
            if job is None:
                _rest()
                continue
            search_path, module_name, module_path, function_name, arguments = job
            sys.path[:] = search_path
            try:
                function = getattr(_import_from(module_name, module_path), function_name)
                args, kwargs = pickle.loads(arguments)
                # Pickled here, so that tensors travel as bytes and not as open file descriptors.
                result = True, pickle.dumps(function(*args, **kwargs))
            except BaseException:
                result = False, traceback.format_exc()
            jobs.send(result)


def _rest() -> None:
    """Leave the groups of the last job: their threads wake up a hundred times a second each."""
    # Importing megatron takes seconds.
    if "megatron.core.parallel_state" in sys.modules:
        from megatron_leangrpo import platform

        platform.leave_megatron_groups()
        # A group ends with the last cycle of objects that has it.
        gc.collect()


class RankPool:
    """`world_size` processes joined in one gloo world."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = str(Path(self._folder.name) / "store")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = CONTEXT.Pipe()
            # Not daemons: megatron's checkpoint writer starts processes of its own.
            process = CONTEXT.Process(target=_serve, args=(rank, world_size, store, theirs))
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(
        self, function: Callable[..., Any], args: tuple, kwargs: dict, timeout_seconds: float
    ) -> list[Any]:
        """Every rank's return value of `function(*args, **kwargs)`, in rank order."""
        module = sys.modules[function.__module__]
        arguments = pickle.dumps((args, kwargs))
        job = (list(sys.path), module.__name__, module.__file__, function.__name__, arguments)
        for connection in self._connections:
            connection.send(job)
        values: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(values) < self.world_size:
            waiting = {c: r for r, c in enumerate(self._connections) if r not in values}
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = sorted(waiting.values())
                raise RankError(f"ranks {ranks} gave no result in {timeout_seconds:.0f} s")
            for connection in ready:
                rank = waiting[connection]
                values[rank] = self._receive(rank, connection)
        # Not before all are through: one may still be talking to another.
        for connection in self._connections:
            connection.send(None)
        return [values[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int, connection: Connection) -> Any:
        try:
            good, value = connection.recv()
        except EOFError:
            self._processes[rank].join()
            code = self._processes[rank].exitcode
            raise RankError(f"rank {rank} died with exit code {code}") from None
        if not good:
            raise RankError(f"rank {rank} of {self.world_size} raised:\n{value}")
        return pickle.loads(value)

    def close(self) -> None:
        """Stop the ranks, and what they started, at once: they may hang in a collective."""
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


class RankLauncher:
    """Runs functions on gloo ranks; see the `run_ranks` fixture."""

    def __init__(self) -> None:
        self._pool: RankPool | None = None
        atexit.register(self.close)

    def __call__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        **kwargs: Any,
    ) -> list[Any]:
        if world_size == 1:
            return [self._run_here(function, args, kwargs)]
        if self._pool is None or self._pool.world_size != world_size:
            # Idle ranks cost memory and, with gloo, processor time; new ones cost little.
            self.close()
            self._pool = RankPool(world_size)
        try:
            return self._pool.run(function, args, kwargs, timeout_seconds)
        except BaseException:
            # The other ranks may hang in a collective; the next test gets a fresh world.
            self.close()
            raise

    @staticmethod
    def _run_here(function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """One rank needs no process of its own, only the state of none before and after."""
        from megatron_leangrpo import platform

        try:
            return function(*args, **kwargs)
        finally:
            platform.destroy_distributed()

    def close(self) -> None:
        """Stop the ranks."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
