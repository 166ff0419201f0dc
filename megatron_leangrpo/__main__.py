# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""``python -m megatron_leangrpo`` (and ``torchrun -m megatron_leangrpo``) is ``leangrpo``."""

from megatron_leangrpo.cli import main

if __name__ == "__main__":
    main()
