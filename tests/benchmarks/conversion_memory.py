# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Memory and time of converting a checkpoint that is larger than the memory one wants to give it.

    python -m tests.benchmarks.conversion_memory [--gigabytes 6]

Makes a FLUX of FLUX.1-dev's width in a temporary folder, converts it to megatron's format and back,
compares both ends bit by bit, and removes everything. Needs three times the size on the disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoints_tools.exporting import export_weights
from checkpoints_tools.importing import import_weights
from checkpoints_tools.opening import open_checkpoint
from checkpoints_tools.verifying import compare
from megatron_leangrpo.models.common.conversion import TensorInfo, TensorSource
from megatron_leangrpo.models.common.weights import full_shapes
from megatron_leangrpo.models.flux.config import flux_dev, to_diffusers_config
from megatron_leangrpo.models.flux.model import FluxTransformer
from megatron_leangrpo.models.flux.weight_map import weight_rules
from megatron_leangrpo.models.saving import save_transformer_folder

GB = 10**9
ALLOWED = 2 * GB
"""Bytes beside the largest file."""
_SHARD = 3 * GB
# A double block of FLUX.1-dev and two single ones, in bfloat16.
_BLOCKS = 1.25 * GB


class _Noise(TensorSource):
    """Cheap bfloat16 tensors, no two alike."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._layout = {n: TensorInfo(tuple(s), torch.bfloat16) for n, s in shapes.items()}
        self._block = torch.randn(1 << 20).bfloat16()
        self._number = {name: n for n, name in enumerate(shapes)}

    @property
    def layout(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every tensor."""
        return self._layout

    def __getitem__(self, name: str) -> torch.Tensor:
        numel = self._layout[name].num_elements
        block = self._block.roll(self._number[name])
        return block.repeat(-(-numel // block.numel()))[:numel].view(self._layout[name].shape)


@dataclass
class Measured:
    """What a step has taken."""

    seconds: float
    peak_growth: int
    """Bytes by which resident memory, mapped files included, has grown at most."""


def measure(step: Callable[[], object]) -> Measured:
    """Run a step; the kernel keeps the high-water mark."""
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _status("VmRSS"), time.perf_counter()
    step()
    return Measured(time.perf_counter() - start, _status("VmHWM") - before)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def convert(folder: Path, gigabytes: float) -> dict[str, float | bool]:
    """Make a checkpoint in `folder`, convert it there and back, and say what that took."""
    blocks = max(1, round(gigabytes * GB / _BLOCKS + 0.5))
    config = flux_dev(num_double_blocks=blocks, num_single_blocks=2 * blocks)
    with torch.device("meta"):
        shapes = full_shapes(FluxTransformer(config), weight_rules(config))
    published, megatron, exported = (str(folder / n) for n in ("published", "megatron", "exported"))
    save_transformer_folder(published, to_diffusers_config(config), _Noise(shapes), _SHARD)
    sizes = [file.stat().st_size for file in Path(published).glob("*.safetensors")]
    forth = measure(lambda: import_weights("flux", published, megatron, 2))
    back = measure(lambda: export_weights(megatron, exported, False, _SHARD))
    pair = [open_checkpoint(path, "path") for path in (published, exported)]
    return {
        "checkpoint_bytes": sum(sizes),
        "largest_file_bytes": max(sizes),
        "import_seconds": forth.seconds,
        "import_peak_growth_bytes": forth.peak_growth,
        "export_seconds": back.seconds,
        "export_peak_growth_bytes": back.peak_growth,
        "allowed_bytes": max(sizes) + ALLOWED,
        "equal": compare(*pair).equal,
    }


def main() -> None:
    """Convert, print one JSON object, clean up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=6.0, help="size of the checkpoint")
    gigabytes = parser.parse_args().gigabytes
    folder = Path(tempfile.mkdtemp(prefix="conversion_memory_"))
    try:
        print(json.dumps(convert(folder, gigabytes), indent=1))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
