# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Where the time of a contestant goes: forward, backward, the rest, and the dearest operators."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_leangrpo.reporting.console import Console
from tests.benchmarks.contestants import Contestant
from tests.benchmarks.measure import Figure

_TOP_OPERATORS = 12


def explain(console: Console, contestants: Sequence[Contestant], missed: Sequence[Figure]) -> None:
    """Print the profile of every schedule that misses a ceiling, and of what it is held against."""
    names = {name for figure in missed for name in (figure.schedule, figure.against)}
    involved = [contestant for contestant in contestants if contestant.name in names]
    if not involved:
        console.line("no figure is more than 7 % below its ceiling: nothing to account for")
        return
    rows = []
    for contestant in involved:
        seconds, spent = split(contestant)
        rest = seconds - sum(spent.values())
        rows.append([contestant.name, *(f"{s:.3f}" for s in (*spent.values(), rest, seconds))])
    console.table(["seconds", "forward", "backward", "rest", "together"], rows,
                  "one more run of each (recomputation counts to the backward)")  # fmt: skip
    for contestant in involved:
        console.table(["operator", "self ms", "share", "calls"], operators(contestant.run),
                      f"{contestant.name}: operators with the most time of their own")  # fmt: skip


def split(contestant: Contestant) -> tuple[float, dict[str, float]]:
    """Seconds of one run, and of its forwards and its backwards."""
    spent = {"forward": 0.0, "backward": 0.0}
    began: list[float] = []

    def start(*_: Any) -> None:
        began.append(time.perf_counter())

    def stop(*_: Any) -> None:
        spent["forward"] += time.perf_counter() - began.pop()

    handles = [
        contestant.transformer.register_forward_pre_hook(start, prepend=True),
        contestant.transformer.register_forward_hook(stop),
    ]
    try:
        with _clocked_backwards(spent):
            seconds = contestant.run()
    finally:
        for handle in handles:
            handle.remove()
    return seconds, spent


@contextmanager
def _clocked_backwards(spent: dict[str, float]) -> Iterator[None]:
    def clocked(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent["backward"] += time.perf_counter() - start

        return run

    backward, grad = torch.autograd.backward, torch.autograd.grad
    with (
        mock.patch.object(torch.autograd, "backward", clocked(backward)),
        mock.patch.object(torch.autograd, "grad", clocked(grad)),
    ):
        yield


def operators(run: Callable[[], object]) -> list[list[str]]:
    """The operators with the most time of their own: name, milliseconds, share, calls."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    return [
        [e.key[:60], f"{e.self_cpu_time_total / 1e3:.1f}", f"{e.self_cpu_time_total / total:.1%}",
         str(e.count)]
        for e in events[:_TOP_OPERATORS]
    ]  # fmt: skip
