# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""One line of the table that pre-flight prints."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """Something looked at: its name, whether it is good, and what was found."""

    name: str
    good: bool
    found: str
