# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Replay: roll out without graphs, then run every trained step again with gradients.

What DanceGRPO and Flow-GRPO do, and the only schedule that is right off-policy.
"""

from megatron_leangrpo.grpo.schedules.base import DeferredSchedule


class ReplaySchedule(DeferredSchedule):
    """N + 3T forward-equivalents a sample; one step's activations at a time."""

    name = "replay"
    keeps_graph = False
