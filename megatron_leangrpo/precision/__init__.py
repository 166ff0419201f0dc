# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""FP8: transformer-engine's recipes emulated on the host, and its own linears on a GPU."""
