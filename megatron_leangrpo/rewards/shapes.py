# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The closed world of coloured shapes, shared by the renderers and the verifiers."""

import torch
from torch import Tensor

COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.13, 0.13),
    "green": (0.12, 0.66, 0.22),
    "blue": (0.15, 0.30, 0.88),
    "yellow": (0.93, 0.82, 0.12),
    "purple": (0.58, 0.18, 0.72),
    "pink": (0.96, 0.45, 0.70),
}
SHAPES = ("circle", "square", "triangle", "cross")
MOTION_COLORS = ("red", "green", "blue", "yellow")
DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
"""As (x, y), y points down."""


def shape_prompts() -> list[str]:
    """All colour and shape combinations, "a red circle" first."""
    return [f"a {color} {shape}" for color in COLORS for shape in SHAPES]


def motion_prompts() -> list[str]:
    """All colour and direction combinations, "a red circle moving left" first."""
    return [
        f"a {color} circle moving {direction}"
        for color in MOTION_COLORS
        for direction in DIRECTIONS
    ]


def signed_distance(shape: str, x: Tensor, y: Tensor) -> Tensor:
    """Distance to the outline of a unit-size shape around the origin, < 0 inside; y points down."""
    if shape == "circle":
        return torch.hypot(x, y) - 0.95
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - 0.85
    if shape == "triangle":
        # Apex up, base at y = 0.8; the two slanted sides have the unit normal (+-0.8944, -0.4472).
        return torch.maximum(0.8944 * x.abs() - 0.4472 * (y + 1.0), y - 0.8)
    if shape == "cross":
        bars = torch.minimum(
            torch.maximum(x.abs() - 0.95, y.abs() - 0.33),
            torch.maximum(x.abs() - 0.33, y.abs() - 0.95),
        )
        return bars
    raise ValueError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
