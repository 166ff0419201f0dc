# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Benchmarks. Libraries are quieted here, before a module of the package imports torch."""

import os

from megatron_leangrpo.reporting.quiet import quiet_libraries

quiet_libraries()
# torch's allocator warns of every profile that sees older memory freed.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
