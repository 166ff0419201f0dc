# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Peak memory of the process."""

import subprocess
import sys

PROGRAM = """
import torch
from megatron_leangrpo.reporting.memory import peak_memory_bytes, reset_peak_memory

reset_peak_memory()
before = peak_memory_bytes()
block = torch.ones(64 * 2**20, dtype=torch.uint8)
held = peak_memory_bytes()
del block
print(held - before, peak_memory_bytes() - before)
"""


def test_the_peak_sees_an_allocation_and_remembers_it():
    # In a process of its own: another test's may hold freed memory, which an allocation reuses.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    held, remembered = map(int, done.stdout.split())
    # Half, because other memory may be given back meanwhile, and pages are counted lazily.
    assert min(held, remembered) > 32 * 2**20
