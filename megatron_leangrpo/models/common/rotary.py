# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding over several axes, rotating neighbouring pairs as diffusers does."""

import torch

THETA = 10000.0


def rotary_table(positions: torch.Tensor, axes_dims: tuple[int, ...]) -> torch.Tensor:
    """Unit complex numbers `[s, head_dim / 2]` in complex128 for integer positions `[s, axes]`."""
    angles = []
    for axis, dim in enumerate(axes_dims):
        powers = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
        angles.append(torch.outer(positions[:, axis].double(), 1.0 / THETA**powers))
    joined = torch.cat(angles, dim=-1)
    return torch.polar(torch.ones_like(joined), joined)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of the last dimension of `[s, ..., head_dim]`, float32 or wider."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    table = table.view(table.shape[0], *(1,) * (x.dim() - 2), table.shape[1])
    return torch.view_as_real(pairs * table).flatten(-2)
