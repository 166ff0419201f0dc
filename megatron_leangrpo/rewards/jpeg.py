# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""JPEG size as a reward: DDPO's toy, at Flow-GRPO's scale."""

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_leangrpo.rewards.base import round_to_8_bits
from megatron_leangrpo.rewards.registry import register_reward

QUALITY = 95


def jpeg_bytes(image: Tensor) -> int:
    """Size of one image [3, H, W] in [0, 1] as a quality-95 JPEG."""
    from PIL import Image

    pixels = round_to_8_bits(image)
    buffer = io.BytesIO()
    picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    picture.save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell()


def incompressibility(size: int) -> float:
    """Kilobytes (of 1000 bytes)."""
    return size / 1000


def compressibility(size: int) -> float:
    """Minus the kilobytes over 500, so that it sits on the scale of other rewards."""
    return -incompressibility(size) / 500


@register_reward("jpeg_incompressibility")
class JpegIncompressibility:
    """Bigger files score higher."""

    rounds_pixels = True

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        sizes = [incompressibility(jpeg_bytes(image)) for image in images]
        return torch.tensor(sizes, dtype=torch.float64)


@register_reward("jpeg_compressibility")
class JpegCompressibility:
    """Smaller files score higher."""

    rounds_pixels = True

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        sizes = [compressibility(jpeg_bytes(image)) for image in images]
        return torch.tensor(sizes, dtype=torch.float64)
