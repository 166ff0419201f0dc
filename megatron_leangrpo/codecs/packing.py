# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""FLUX's packing: 2 x 2 neighbouring latents make one token, channels in (c, 2, 2) order."""

from torch import Tensor


def pack_latents(latents: Tensor) -> Tensor:
    """[b, c, h, w] -> [b, (h / 2)(w / 2), 4c], tokens row by row."""
    b, c, h, w = latents.shape
    tiles = latents.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return tiles.reshape(b, (h // 2) * (w // 2), 4 * c)


def unpack_latents(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """[b, rows * columns, 4c] -> [b, c, 2 rows, 2 columns]."""
    b, count, channels = tokens.shape
    assert count == rows * columns, f"{count} tokens do not fill a {rows} x {columns} grid"
    tiles = tokens.reshape(b, rows, columns, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return tiles.reshape(b, channels // 4, 2 * rows, 2 * columns)


def pack_video_latents(latents: Tensor) -> Tensor:
    """[b, c, frames, h, w] -> [b, frames (h / 2)(w / 2), 4c], frame by frame."""
    frames = latents.transpose(1, 2)
    return pack_latents(frames.flatten(0, 1)).reshape(len(latents), -1, 4 * latents.shape[1])


def unpack_video_latents(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """[b, frames * rows * columns, 4c] -> [b, c, frames, 2 rows, 2 columns]."""
    b, count, channels = tokens.shape
    assert count % (rows * columns) == 0, f"{count} tokens are not frames of {rows} x {columns}"
    frames = unpack_latents(tokens.reshape(-1, rows * columns, channels), rows, columns)
    return frames.unflatten(0, (b, -1)).transpose(1, 2)
