# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Collectives cut into slices that travel while the matrix products beside them run."""
