# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The pictures that the embedded bases are pre-trained on, drawn on demand, with exact captions."""

import colorsys
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_leangrpo.rewards.shapes import COLORS, SHAPES, shape_prompts, signed_distance

IMAGE_SIZE = 32


@dataclass(frozen=True)
class TinyTask:
    """A closed set of prompts and the renderer of prompt number i."""

    name: str
    prompts: list[str]
    metadata: list[dict[str, str]]
    draw: Callable[[int, random.Random], Tensor]
    vae_steps: int
    flux_steps: int

    def render(self, indices: list[int], seed: int) -> Tensor:
        """Images [n, 3, 32, 32] in [0, 1], one for each prompt index."""
        rng = random.Random(seed)
        return torch.stack([self.draw(index, rng) for index in indices])


def draw_digit(digit: int, rng: random.Random) -> Tensor:
    """A digit in a random dark hue, size and place on a light grey background."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    background = rng.uniform(0.8, 1.0)
    color = colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.75, 1.0), rng.uniform(0.45, 0.75))
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), (round(255 * background),) * 3)
    position = [IMAGE_SIZE / 2 + rng.uniform(-2.5, 2.5) for _ in range(2)]
    font = ImageFont.load_default(rng.uniform(22.0, 27.0))
    fill = tuple(round(255 * channel) for channel in color)
    ImageDraw.Draw(image).text(position, str(digit), fill=fill, font=font, anchor="mm")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def draw_shape(index: int, rng: random.Random) -> Tensor:
    """A filled shape of random size and place; the colour varies a little around the palette's."""
    color = list(COLORS.values())[index // len(SHAPES)]
    background = rng.uniform(0.82, 0.94)
    size = rng.uniform(8.0, 11.0)
    center_x, center_y = (IMAGE_SIZE / 2 + rng.uniform(-2.5, 2.5) for _ in range(2))
    pixels = torch.arange(IMAGE_SIZE) + 0.5
    x = (pixels[None, :] - center_x) / size
    y = (pixels[:, None] - center_y) / size
    distance = signed_distance(SHAPES[index % len(SHAPES)], *torch.broadcast_tensors(x, y)) * size
    # One pixel of anti-aliasing.
    mask = (0.5 - distance).clamp(0, 1)
    jittered = [min(1.0, max(0.0, channel + rng.uniform(-0.05, 0.05))) for channel in color]
    fill = torch.tensor(jittered)[:, None, None]
    return mask * fill + (1 - mask) * background


def digit_task() -> TinyTask:
    """Flow-GRPO's text rendering task in small."""
    prompts = [f"the number {digit}" for digit in range(10)]
    metadata = [{"target": str(digit)} for digit in range(10)]
    return TinyTask("digits", prompts, metadata, draw_digit, vae_steps=300, flux_steps=225)


def shape_task() -> TinyTask:
    """Colours and shapes: needs no package beyond torch to be judged."""
    metadata = [{"color": c, "shape": s} for c in COLORS for s in SHAPES]
    return TinyTask("shapes", shape_prompts(), metadata, draw_shape, vae_steps=400, flux_steps=150)


TASKS: dict[str, Callable[[], TinyTask]] = {"digits": digit_task, "shapes": shape_task}
