# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""`python -m checkpoints_tools`."""

from checkpoints_tools.cli import main

main()
