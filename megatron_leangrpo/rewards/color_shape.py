# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Soft verifier for pictures of one coloured shape on a plain background ("GenEval in small").

Needs torch only. Everything is continuous in the pixels: a 0/1 score gives GRPO too little to go
on.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_leangrpo.rewards.base import RewardScores, raise_for_bad_prompts
from megatron_leangrpo.rewards.registry import register_reward
from megatron_leangrpo.rewards.shapes import COLORS, SHAPES, signed_distance

KNOWN = {"color": tuple(COLORS), "shape": SHAPES}
GRID = 24
# Half side of the canonical window, in units of sqrt(area): a margin around the widest shape.
WINDOW = 0.85
# Softmax temperatures, chosen so that a clean rendering scores above 0.9.
COLOR_TEMPERATURE = 0.006
SHAPE_TEMPERATURE = 0.015
# A shape of less than this share of the picture counts as proportionally absent.
MIN_AREA = 0.04


def expected(prompt: str, metadata: dict[str, Any], keys: Sequence[str]) -> list[int]:
    """Palette and shape index asked for; metadata "color" and "shape" win over the text."""
    words = prompt.lower().replace(".", " ").replace(",", " ").split()
    found = []
    for key in keys:
        known = KNOWN[key]
        named = [metadata[key]] if key in metadata else [word for word in words if word in known]
        if len(named) != 1 or named[0] not in known:
            raise ValueError(f"names {len(named)} {key}s, must be one of {', '.join(known)}")
        found.append(known.index(named[0]))
    return found


def foreground_mask(images: Tensor) -> tuple[Tensor, Tensor]:
    """Soft mask [n, H, W] of what differs from the border's median colour, and that [n, 3]."""
    top_bottom = torch.cat([images[:, :, 0], images[:, :, -1]], -1)
    left_right = torch.cat([images[:, :, :, 0], images[:, :, :, -1]], -1)
    background = torch.cat([top_bottom, left_right], -1).median(-1).values
    distance = (images - background[:, :, None, None]).norm(dim=1)
    return torch.sigmoid((distance - 0.25) / 0.05), background


def normalized_crop(mask: Tensor) -> Tensor:
    """Masks [n, H, W] moved to their centroid and scaled to equal area: [n, GRID, GRID]."""
    n, height, width = mask.shape
    rows = torch.arange(height, dtype=mask.dtype) + 0.5
    columns = torch.arange(width, dtype=mask.dtype) + 0.5
    area = mask.sum((1, 2)).clamp_min(1.0)
    center_y = (mask.sum(2) * rows).sum(1) / area
    center_x = (mask.sum(1) * columns).sum(1) / area
    offsets = torch.linspace(-1, 1, GRID, dtype=mask.dtype) * WINDOW
    x = center_x[:, None] + offsets * area.sqrt()[:, None]
    y = center_y[:, None] + offsets * area.sqrt()[:, None]
    grid = torch.stack(
        [
            (2 * x / width - 1)[:, None, :].expand(n, GRID, GRID),
            (2 * y / height - 1)[:, :, None].expand(n, GRID, GRID),
        ],
        dim=-1,
    )
    return functional.grid_sample(mask[:, None], grid, align_corners=False)[:, 0]


def shape_templates() -> Tensor:
    """The crops [shapes, GRID, GRID] that clean renderings give."""
    side = 96
    axis = (torch.arange(side) + 0.5) / side * 4 - 2
    x, y = axis[None, :].expand(side, side), axis[:, None].expand(side, side)
    masks = [(0.5 - signed_distance(shape, x, y) * side / 4).clamp(0, 1) for shape in SHAPES]
    return normalized_crop(torch.stack(masks))


@register_reward("color_shape")
class ColorShapeReward:
    """P(right colour) x P(right shape) x presence, in [0, 1]."""

    name, keys = "color_shape", ("color", "shape")
    verdict = "of the right colour and shape"

    def __init__(self) -> None:
        self._templates = shape_templates()
        self._palette = torch.tensor(list(COLORS.values()))

    def validate(self, prompts: Sequence[Any], source: object) -> None:
        """Name file and line of prompts that do not ask for one known colour and shape."""
        problems = []
        for prompt in prompts:
            try:
                expected(prompt.text, prompt.metadata, self.keys)
            except ValueError as error:
                problems.append((prompt.id, f"{error}: {prompt.text!r}"))
        raise_for_bad_prompts(problems, self.name, source)

    def probabilities(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Colour [n, colors] and shape [n, shapes] probabilities, and presence [n]."""
        images = images.detach().to("cpu", torch.float32)
        mask, _ = foreground_mask(images)
        area = mask.sum((1, 2))
        mean_color = (images * mask[:, None]).sum((2, 3)) / area.clamp_min(1e-6)[:, None]
        color_error = (mean_color[:, None] - self._palette).square().mean(-1)
        shape_error = (normalized_crop(mask)[:, None] - self._templates).square().mean((-2, -1))
        presence = (area / (MIN_AREA * mask[0].numel())).clamp(max=1.0)
        return (
            torch.softmax(-color_error / COLOR_TEMPERATURE, -1),
            torch.softmax(-shape_error / SHAPE_TEMPERATURE, -1),
            presence,
        )

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> RewardScores:
        pairs = zip(prompts, metadata, strict=True)
        wanted = torch.tensor([expected(p, m, self.keys) for p, m in pairs])
        color, shape, presence = self.probabilities(images)
        rows = torch.arange(len(wanted))
        scores = color[rows, wanted[:, 0]] * shape[rows, wanted[:, 1]] * presence
        right = (color.argmax(-1) == wanted[:, 0]) & (shape.argmax(-1) == wanted[:, 1])
        return RewardScores(scores.double(), right & (presence > 0.5))


@register_reward("color")
class ColorReward(ColorShapeReward):
    """P(right colour) x presence, whatever has the colour; goes well beside a reward of text."""

    name, keys = "color", ("color",)
    verdict = "of the right colour"

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> RewardScores:
        pairs = zip(prompts, metadata, strict=True)
        wanted = torch.tensor([expected(p, m, self.keys)[0] for p, m in pairs])
        color, _, presence = self.probabilities(images)
        scores = color[torch.arange(len(wanted)), wanted] * presence
        return RewardScores(scores.double(), (color.argmax(-1) == wanted) & (presence > 0.5))
