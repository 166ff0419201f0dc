# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint."""

from __future__ import annotations

from collections import Counter
from typing import Any

from checkpoints_tools.opening import Checkpoint
from megatron_leangrpo.checkpoint.stored import StoredTensors


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Format, model, sizes, step, layout, and every tensor as it is stored; plain JSON."""
    layout = checkpoint.tensors.layout
    dtypes = Counter(str(info.dtype).removeprefix("torch.") for info in layout.values())
    described: dict[str, Any] = {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "model": checkpoint.family_name,
        "architecture": checkpoint.family.describe(checkpoint.settings),
        "transformers": list(checkpoint.folders),
        "parameters": sum(info.num_elements for info in layout.values()),
        "bytes": sum(info.num_bytes for info in layout.values()),
        "dtypes": dict(dtypes),
        "step": checkpoint.step,
        "notes": checkpoint.notes,
        "config": checkpoint.config,
        "tensors": {
            name: {"shape": list(info.shape), "dtype": str(info.dtype).removeprefix("torch.")}
            for name, info in layout.items()
        },
    }
    if isinstance(checkpoint.tensors, StoredTensors):
        described["tensor_model_parallel_size"] = checkpoint.tensors.parts()
        described["has_average"] = checkpoint.tensors.has_average
        described["reward"] = checkpoint.tensors.manifest.reward
    return described
