# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Retain: keep the graphs that the rollout built and run their backwards once rewards are known."""

from megatron_leangrpo.grpo.schedules.base import DeferredSchedule


class RetainSchedule(DeferredSchedule):
    """N + 2T forward-equivalents a sample; T steps' activations of every trajectory in flight."""

    name = "retain"
    keeps_graph = True
