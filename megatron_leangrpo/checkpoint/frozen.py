# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which base a checkpoint of adapters stands on: a checksum of the weights that are not trained."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_leangrpo import platform
from megatron_leangrpo.models.common.weights import shard_dim
from megatron_leangrpo.parallel.stages import said_by_stages

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def frozen_checksum(model: torch.nn.Module) -> str | None:
    """A checksum that is equal in every layout; None where all is trained (a collective).

    Sums of bits, modulo 2^64, do not depend on how a tensor is cut.
    """
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    everything: dict[str, int] = {}
    for stage in said_by_stages(_sums(frozen) if frozen else {}):
        everything |= stage
    if not everything:
        return None
    return hashlib.sha256(repr(sorted(everything.items())).encode()).hexdigest()


def _sums(frozen: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sum of the bits of each whole tensor, over tensor-parallel ranks."""
    sums = torch.stack([_sum_of_bits(parameter) for parameter in frozen.values()])
    whole = sums.clone()
    dist.all_reduce(whole, group=platform.tp_group())
    is_cut = torch.tensor([shard_dim(p) is not None for p in frozen.values()], device=sums.device)
    return dict(zip(frozen, torch.where(is_cut, whole, sums).tolist()))


def _sum_of_bits(parameter: torch.Tensor) -> torch.Tensor:
    bits = parameter.detach().contiguous().view(_BITS[parameter.element_size()])
    return bits.sum(dtype=torch.int64)


def check_frozen(checkpoint: Path, stored: str | None, model: torch.nn.Module) -> None:
    """Raise ``ValueError`` where a checkpoint's adapters were trained on other weights."""
    own = frozen_checksum(model)
    if (stored is None) != (own is None):
        what = "all weights" if stored is None else "adapters"
        raise ValueError(
            f"checkpoint {checkpoint} is of a run that trained {what}; lora.rank or lora.path of "
            "this run say otherwise"
        )
    if stored != own:
        raise ValueError(
            f"checkpoint {checkpoint} holds adapters that were trained on other weights than those "
            "that model.base, model.weights or seed give now; use the base of its run"
        )
