# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Peak memory of the process."""

import torch

from megatron_leangrpo.reporting.memory import peak_memory_bytes, reset_peak_memory


def test_the_peak_sees_an_allocation_and_remembers_it():
    reset_peak_memory()
    before = peak_memory_bytes()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    held = peak_memory_bytes()
    # Half, because other memory may be given back meanwhile.
    assert held - before > 32 * 2**20
    del block
    # The kernel counts pages lazily, so the same peak may read a little less later.
    assert peak_memory_bytes() > before + 32 * 2**20
