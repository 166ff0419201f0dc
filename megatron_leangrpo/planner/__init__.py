# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Predicts memory and seconds of a run from shapes alone, and chooses a schedule."""
