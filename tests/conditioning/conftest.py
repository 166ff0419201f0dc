# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

import megatron_leangrpo


@pytest.fixture(scope="session")
def base_folder():
    """The embedded digit base."""
    return Path(megatron_leangrpo.__file__).parent / "assets" / "flux_digits"
