# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Pins what an image has installed for the GPU, for pip's --constraint; --compare FILE checks it.

A version that no index has (built from a checkout) is pinned as well: pip then keeps the one that
is there, or ends with an error.
"""

import importlib.metadata
import re
import sys
from pathlib import Path

# What decides how a GPU run computes, and must be the image's own; others may be raised.
GPU_PACKAGES = re.compile(r"(torch(vision|audio)?|triton|pytorch.triton|apex|nvidia-.*|cuda-.*|"
                          r"transformer.engine.*|flash.attn.*|cupy.*)")  # fmt: skip


def installed() -> dict[str, str]:
    """Normalised names and versions of the GPU packages that are there."""
    found = {}
    for package in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"] or "").lower()
        if GPU_PACKAGES.fullmatch(name):
            found.setdefault(name, package.version)
    return found


def main() -> int:
    """Print the pins, or say which GPU package is no longer the image's."""
    if sys.argv[1:2] != ["--compare"]:
        for name, version in sorted(installed().items()):
            print(f"{name}=={version}")
        return 0
    pins = dict(line.split("==", 1) for line in Path(sys.argv[2]).read_text().split())
    now = installed()
    changed = sorted(name for name in {*pins, *now} if pins.get(name) != now.get(name))
    for name in changed:
        print(f"{name}: the image has {pins.get(name)}, now {now.get(name)}", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
