# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What every pipeline stage tells all others: small facts, and tensors that only it has."""

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_leangrpo import platform


def of_all_stages(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of every pipeline stage, on every one (a collective)."""
    group, everything = platform.pp_group(), {}
    layouts = said_by_stages(
        {n: [list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in tensors.items()}
    )
    for stage, layout in enumerate(layouts):
        source = dist.get_global_rank(group, stage)
        for name, (shape, dtype) in layout.items():
            assert name not in everything, f"two stages have {name}"
            if stage == platform.pp_rank():
                everything[name] = tensors[name].to(platform.device())
            else:
                empty = torch.empty(shape, dtype=getattr(torch, dtype), device=platform.device())
                everything[name] = empty
            dist.broadcast(everything[name], src=source, group=group)
    return everything


def said_by_stages(content: Any) -> list[Any]:
    """The `content` of each pipeline stage, first to last, which travels as JSON (a collective)."""
    if platform.pp_size() == 1:
        return [content]
    group, device, said = platform.pp_group(), platform.device(), []
    for stage in range(platform.pp_size()):
        raw = json.dumps(content).encode("utf-8") if stage == platform.pp_rank() else b""
        source = dist.get_global_rank(group, stage)
        length = torch.tensor([len(raw)], device=device)
        dist.broadcast(length, src=source, group=group)
        buffer = torch.zeros(int(length), dtype=torch.uint8, device=device)
        if raw:
            buffer.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        dist.broadcast(buffer, src=source, group=group)
        said.append(json.loads(bytes(buffer.cpu().tolist())))
    return said
