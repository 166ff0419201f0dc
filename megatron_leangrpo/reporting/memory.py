# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Peak memory of this process: of the CUDA allocator, or resident on the host."""

import contextlib
import resource
from pathlib import Path

from megatron_leangrpo import platform


def peak_memory_bytes() -> int:
    """Return the peak since the start or the last reset."""
    if not platform.is_host():
        import torch

        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_memory() -> None:
    """Start the peak anew; on a host that does not allow it the peak stays that of the process."""
    if not platform.is_host():
        import torch

        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        # 5 resets the high-water mark of the resident set (man 5 proc).
        Path("/proc/self/clear_refs").write_text("5")
