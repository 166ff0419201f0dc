# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""How pictures travel between a reward client and a reward server: losslessly, as JSON.

A video is its frames, one after the other.

8-bit PNG where the reward rounds pixels to 8 bits anyway, raw float32 otherwise: a remote reward
sees the same numbers as a local one, bit for bit.
"""

import base64
import binascii
import io
import sys
import zlib
from typing import Any

import torch
from torch import Tensor

from megatron_leangrpo.rewards.base import round_to_8_bits

FORMATS = ("png", "float32")
TOKEN_VARIABLE = "LEANGRPO_REWARD_TOKEN"

assert sys.byteorder == "little", "float32 pictures are written as little-endian numbers"


def encode_picture(image: Tensor, picture_format: str) -> dict[str, Any]:
    """One image [3, H, W] in [0, 1] as plain JSON data."""
    if picture_format == "png":
        from PIL import Image

        pixels = round_to_8_bits(image).permute(1, 2, 0).contiguous().numpy()
        buffer = io.BytesIO()
        # Level 1: pictures of a rollout are sent once, and zlib is slower than most networks.
        Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1)
        content = buffer.getvalue()
    else:
        content = image.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()
    return {
        "format": picture_format,
        "height": image.shape[1],
        "width": image.shape[2],
        "data": base64.b64encode(content).decode("ascii"),
    }


def decode_picture(picture_format: str, height: int, width: int, data: str) -> Tensor:
    """The image [3, H, W]: uint8 from a PNG, else float32. ValueError for anything else.

    Nothing is decompressed before the size in the file's header has been compared.
    """
    try:
        content = base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"data is not base64: {error}") from error
    if picture_format == "png":
        return _decode_png(content, height, width)
    if len(content) != 12 * height * width:
        raise ValueError(
            f"{len(content)} bytes are not the 12 x {height} x {width} of a float32 picture"
        )
    image = torch.frombuffer(bytearray(content), dtype=torch.float32).view(3, height, width)
    if not (image.isfinite().all() and image.min() >= 0 and image.max() <= 1):
        raise ValueError("float32 pixels must be in [0, 1]")
    return image


def _decode_png(content: bytes, height: int, width: int) -> Tensor:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
            if picture.mode != "RGB" or picture.size != (width, height):
                raise ValueError(f"the PNG is {picture.mode} of {picture.size}")
            pixels = bytearray(picture.tobytes())
    except (OSError, SyntaxError, EOFError, zlib.error, Image.DecompressionBombError) as error:
        raise ValueError(f"not a readable PNG: {error}") from error
    image = torch.frombuffer(pixels, dtype=torch.uint8).view(height, width, 3)
    return image.permute(2, 0, 1).contiguous()


def to_unit_range(image: Tensor) -> Tensor:
    """A decoded image, of bytes or numbers, as float32 in [0, 1]."""
    return image.float() / 255 if image.dtype == torch.uint8 else image
