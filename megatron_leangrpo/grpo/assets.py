# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Finds what a recipe names: a path of the user's, or a file that comes with the package."""

from pathlib import Path

ASSETS = Path(__file__).parent.parent / "assets"


def resolve_asset(name: str) -> Path | None:
    """Return the path `name`, or the packaged asset of that name, or None."""
    for path in (Path(name), ASSETS / name):
        if path.exists():
            return path
    return None
