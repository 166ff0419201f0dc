# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What the embedded bases are pre-trained on, drawn on demand, with exact captions."""

import colorsys
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_leangrpo.rewards.shapes import (
    COLORS,
    DIRECTIONS,
    MOTION_COLORS,
    SHAPES,
    motion_prompts,
    shape_prompts,
    signed_distance,
)

IMAGE_SIZE = 32
FRAMES = 9


@dataclass(frozen=True)
class TinyTask:
    """A closed set of prompts and the renderer of prompt number i."""

    name: str
    prompts: list[str]
    metadata: list[dict[str, str]]
    draw: Callable[[int, random.Random], Tensor]
    """Prompt number i to an image [3, 32, 32] or a video [3, frames, 32, 32], in [0, 1]."""
    vae_steps: int
    transformer_steps: int
    held_out: tuple[int, ...] = ()
    """Prompts that a run should not train on, in a file of their own."""

    def prompt_files(self) -> dict[str, list[int]]:
        """The prompts by the name of their file."""
        rest = [index for index in range(len(self.prompts)) if index not in self.held_out]
        files = {"prompts.jsonl": rest}
        return {**files, "held_out.jsonl": list(self.held_out)} if self.held_out else files

    def render(self, indices: list[int], seed: int) -> Tensor:
        """What `draw` gives, stacked, one for each prompt index."""
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
    """A filled shape of random size and place on a light grey background."""
    color = list(COLORS.values())[index // len(SHAPES)]
    background = rng.uniform(0.82, 0.94)
    size = rng.uniform(8.0, 11.0)
    center = [IMAGE_SIZE / 2 + rng.uniform(-2.5, 2.5) for _ in range(2)]
    mask = _coverage(SHAPES[index % len(SHAPES)], *(torch.tensor(c) for c in center), size)
    fill = _jittered(color, rng)[:, None, None]
    return mask * fill + (1 - mask) * background


def draw_clip(index: int, rng: random.Random) -> Tensor:
    """A circle crossing the middle third of the picture at constant speed: [3, 9, 32, 32]."""
    color = COLORS[MOTION_COLORS[index // len(DIRECTIONS)]]
    direction = list(DIRECTIONS.values())[index % len(DIRECTIONS)]
    background = rng.uniform(0.82, 0.94)
    size = rng.uniform(5.5, 7.0)
    way = torch.linspace(-0.5, 0.5, FRAMES) * rng.uniform(9.0, 12.0)
    x, y = (IMAGE_SIZE / 2 + rng.uniform(-2.5, 2.5) + way * along for along in direction)
    mask = _coverage("circle", x, y, size)
    fill = _jittered(color, rng)[:, None, None, None]
    return mask * fill + (1 - mask) * background


def _coverage(shape: str, center_x: Tensor, center_y: Tensor, size: float) -> Tensor:
    """Share [..., 32, 32] of each pixel that the shape covers, for centers of shape [...]."""
    pixels = torch.arange(IMAGE_SIZE) + 0.5
    x = (pixels - center_x[..., None])[..., None, :] / size
    y = (pixels - center_y[..., None])[..., :, None] / size
    distance = signed_distance(shape, *torch.broadcast_tensors(x, y)) * size
    # One pixel of anti-aliasing.
    return (0.5 - distance).clamp(0, 1)


def _jittered(color: tuple[float, float, float], rng: random.Random) -> Tensor:
    """A colour [3] near the palette's."""
    return torch.tensor(
        [min(1.0, max(0.0, channel + rng.uniform(-0.05, 0.05))) for channel in color]
    )


def digit_task() -> TinyTask:
    """Flow-GRPO's text rendering task in small."""
    prompts = [f"the number {digit}" for digit in range(10)]
    metadata = [{"target": str(digit)} for digit in range(10)]
    return TinyTask("digits", prompts, metadata, draw_digit, vae_steps=300, transformer_steps=225)


def shape_task() -> TinyTask:
    """Colours and shapes: needs no package beyond torch to be judged."""
    metadata = [{"color": c, "shape": s} for c in COLORS for s in SHAPES]
    return TinyTask(
        "shapes", shape_prompts(), metadata, draw_shape, vae_steps=400, transformer_steps=150
    )


def motion_task() -> TinyTask:
    """A circle of one of four colours, moving in one of four directions."""
    metadata = [{"color": c, "direction": d} for c in MOTION_COLORS for d in DIRECTIONS]
    return TinyTask(
        "motion",
        motion_prompts(),
        metadata,
        draw_clip,
        vae_steps=700,
        transformer_steps=200,
        # Each colour and each direction once.
        held_out=(1, 4, 11, 14),
    )


TASKS: dict[str, Callable[[], TinyTask]] = {"digits": digit_task, "shapes": shape_task}
