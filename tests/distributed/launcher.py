# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Gloo ranks for tests: real processes, started once per world size and reused by every test."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# Longer than any honest test step on a busy machine, shorter than a person's patience.
DEFAULT_TIMEOUT_SECONDS = 120.0


class RankError(AssertionError):
    """A rank raised; the message carries its traceback."""


def _import_from(name: str, path: str) -> ModuleType:
    """The test module `name`, whatever pytest's import mode put (or did not put) on sys.path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _serve(rank: int, world_size: int, store_path: str, jobs: Any, results: Any) -> None:
    """Body of one rank: join the gloo world, then run jobs until killed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(store_path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    while True:
        search_path, module_name, module_path, function_name, arguments = jobs.get()
        sys.path[:] = search_path
        try:
            function = getattr(_import_from(module_name, module_path), function_name)
            args, kwargs = pickle.loads(arguments)
            # Pickled here, so that tensors travel as bytes and not as open file descriptors.
            results.put((rank, True, pickle.dumps(function(*args, **kwargs))))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))


class RankPool:
    """`world_size` processes joined in one gloo world."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._results = context.Queue()
        self._jobs = [context.Queue() for _ in range(world_size)]
        store_path = str(Path(self._folder.name) / "store")
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            self._processes = [
                context.Process(
                    target=_serve,
                    args=(rank, world_size, store_path, self._jobs[rank], self._results),
                    daemon=True,
                )
                for rank in range(world_size)
            ]
            for process in self._processes:
                process.start()
        finally:
            if threads is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = threads

    def run(
        self, function: Callable[..., Any], args: tuple, kwargs: dict, timeout_seconds: float
    ) -> list[Any]:
        """Every rank's return value of `function(*args, **kwargs)`, in rank order."""
        module = sys.modules[function.__module__]
        arguments = pickle.dumps((args, kwargs))
        job = (list(sys.path), module.__name__, module.__file__, function.__name__, arguments)
        for jobs in self._jobs:
            jobs.put(job)
        values: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(values) < self.world_size:
            rank, good, value = self._next_result(deadline, timeout_seconds, values)
            if not good:
                raise RankError(f"rank {rank} of {self.world_size} raised:\n{value}")
            values[rank] = pickle.loads(value)
        return [values[rank] for rank in range(self.world_size)]

    def _next_result(
        self, deadline: float, timeout_seconds: float, values: dict[int, Any]
    ) -> tuple[int, bool, Any]:
        while True:
            try:
                return self._results.get(timeout=1)
            except queue.Empty:
                missing = sorted(set(range(self.world_size)) - set(values))
                dead = [rank for rank in missing if not self._processes[rank].is_alive()]
                if dead:
                    code = self._processes[dead[0]].exitcode
                    raise RankError(f"rank {dead[0]} died with exit code {code}") from None
                if time.monotonic() > deadline:
                    raise RankError(
                        f"ranks {missing} gave no result in {timeout_seconds:.0f} s"
                    ) from None

    def close(self) -> None:
        """Stop the ranks at once: after a failure they may wait in a collective for ever."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


class RankLauncher:
    """Runs functions on gloo ranks; see the `run_ranks` fixture."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        **kwargs: Any,
    ) -> list[Any]:
        pool = self._pools.get(world_size) or RankPool(world_size)
        self._pools[world_size] = pool
        try:
            return pool.run(function, args, kwargs, timeout_seconds)
        except RankError:
            # The other ranks may hang in a collective; the next test gets a fresh world.
            self._pools.pop(world_size).close()
            raise

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
