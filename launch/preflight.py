# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Checks nodes and recipe before a run; see `megatron_leangrpo.preflight.command`."""

from megatron_leangrpo.preflight.command import main

if __name__ == "__main__":
    main()
