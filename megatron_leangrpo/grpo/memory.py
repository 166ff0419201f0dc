# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Peak of the memory allocated while something runs, from the allocator's own events."""

from collections.abc import Callable

import torch

from megatron_leangrpo import platform


def peak_allocated_bytes(run: Callable[[], object]) -> int:
    """Run something and return by how many bytes tensors grew at the highest point.

    On CUDA the caching allocator counts; on the CPU torch's profiler reports every allocation. The
    profiler slows the run down: do not time it.
    """
    if not platform.is_host():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    current = peak = 0
    for change in allocation_changes(run):
        current += change
        peak = max(peak, current)
    return peak


def allocation_changes(run: Callable[[], object]) -> list[int]:
    """Run something on the CPU and return the bytes it allocates and (negative) frees, in order."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())]
