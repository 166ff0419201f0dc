# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a latent codec offers, and the sizes it accepts."""

from typing import Protocol

from torch import Tensor

# FLUX.1: the VAE halves three times, then 2 x 2 latents make a token.
FLUX_MULTIPLE = 16


class LatentCodec(Protocol):
    """From packed latents [b, tokens, channels] to images [b, 3, H, W] in [0, 1].

    Or to videos [b, frames, 3, H, W], whose latents are packed frame by frame.
    """

    makes_videos: bool
    multiple: int
    """Height and width must be divisible by this."""

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens, of a frame in a video."""
        ...

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Images in float32 on the latents' device, without gradient."""
        ...


def check_size(height: int, width: int, multiple: int = FLUX_MULTIPLE) -> None:
    """ValueError naming each bad side, its value, the multiple and the two nearest valid values."""
    problems = []
    for name, side in (("height", height), ("width", width)):
        if side > 0 and side % multiple == 0:
            continue
        below = max(multiple, side // multiple * multiple)
        problems.append(
            f"sampling.{name}={side}: must be a positive multiple of {multiple}; "
            f"nearest valid: {below} or {below + multiple}"
        )
    if problems:
        raise ValueError("; ".join(problems))


def token_grid(height: int, width: int, multiple: int) -> tuple[int, int]:
    """Rows and columns of tokens for a checked size."""
    check_size(height, width, multiple)
    return height // multiple, width // multiple
