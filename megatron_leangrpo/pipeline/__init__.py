# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: blocks on stages, the order of forwards and backwards, and running it."""
