# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The schedules by name; jagg is one of them on windows of several steps."""

from megatron_leangrpo.grpo.schedules.base import DeferredSchedule, Schedule
from megatron_leangrpo.grpo.schedules.replay import ReplaySchedule
from megatron_leangrpo.grpo.schedules.retain import RetainSchedule
from megatron_leangrpo.grpo.schedules.reweight import ReweightSchedule

SCHEDULES: dict[str, type[Schedule]] = {
    schedule.name: schedule for schedule in (ReplaySchedule, RetainSchedule, ReweightSchedule)
}

SCHEDULE_NAMES = (*SCHEDULES, "jagg")

__all__ = [
    "SCHEDULES",
    "SCHEDULE_NAMES",
    "DeferredSchedule",
    "ReplaySchedule",
    "RetainSchedule",
    "ReweightSchedule",
    "Schedule",
]
