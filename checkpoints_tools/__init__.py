# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Converts, compares and lists checkpoints: `python -m checkpoints_tools`."""
