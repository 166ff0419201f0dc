# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Soft verifier for clips of one coloured circle that moves across a plain background.

Needs torch only. Everything is continuous in the pixels: a 0/1 score gives GRPO too little to go
on.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_leangrpo.rewards.base import RewardScores, raise_for_bad_prompts
from megatron_leangrpo.rewards.color_shape import COLOR_TEMPERATURE, MIN_AREA, foreground_mask
from megatron_leangrpo.rewards.registry import register_reward
from megatron_leangrpo.rewards.shapes import COLORS, DIRECTIONS, MOTION_COLORS

NAME = "color_motion"
# Softmax temperature in picture sides: a clean clip moves by 0.3 and scores above 0.95.
MOTION_TEMPERATURE = 0.08
# A circle that moves less than this share of the picture's side has no direction.
MIN_MOTION = 0.1


def expected(prompt: str, metadata: dict[str, Any]) -> tuple[int, int]:
    """Colour and direction index asked for; metadata "color" and "direction" win over the text."""
    words = prompt.lower().replace(".", " ").replace(",", " ").split()
    found = []
    for key, known in (("color", MOTION_COLORS), ("direction", tuple(DIRECTIONS))):
        named = [metadata[key]] if key in metadata else [word for word in words if word in known]
        if len(named) != 1 or named[0] not in known:
            raise ValueError(f"names {len(named)} {key}s, must be one of {', '.join(known)}")
        found.append(known.index(named[0]))
    return found[0], found[1]


def displacement(centers: Tensor, weights: Tensor) -> Tensor:
    """How far [n, 2] the centers [n, frames, 2] move over the clip: the slope of a fitted line.

    Frames count by their weights [n, frames].
    """
    frames = centers.shape[1]
    time = torch.linspace(-0.5, 0.5, frames, dtype=centers.dtype)
    share = weights / weights.sum(1, keepdim=True).clamp_min(1e-6)
    time = time - (share * time).sum(1, keepdim=True)
    moved = centers - (share[..., None] * centers).sum(1, keepdim=True)
    variance = (share * time.square()).sum(1).clamp_min(1e-3)
    return (share[..., None] * time[..., None] * moved).sum(1) / variance[:, None]


@register_reward(NAME)
class ColorMotionReward:
    """P(right colour) x P(right direction) x presence, in [0, 1]."""

    verdict = "of the right colour and direction"
    takes_videos = True

    def __init__(self) -> None:
        self._palette = torch.tensor([COLORS[name] for name in MOTION_COLORS])
        self._directions = torch.tensor(list(DIRECTIONS.values()))

    def validate(self, prompts: Sequence[Any], source: object) -> None:
        """Name file and line of prompts that do not ask for one known colour and direction."""
        problems = []
        for prompt in prompts:
            try:
                expected(prompt.text, prompt.metadata)
            except ValueError as error:
                problems.append((prompt.id, f"{error}: {prompt.text!r}"))
        raise_for_bad_prompts(problems, NAME, source)

    def measure(self, videos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Colour errors [n, colors], displacement [n, 2] in picture sides, and presence [n]."""
        n, frames, _, height, width = videos.shape
        images = videos.detach().to("cpu", torch.float32).flatten(0, 1)
        mask, _ = foreground_mask(images)
        area = mask.sum((1, 2))
        rows = (torch.arange(height) + 0.5) / height
        columns = (torch.arange(width) + 0.5) / width
        center_x = (mask.sum(1) * columns).sum(1) / area.clamp_min(1e-6)
        center_y = (mask.sum(2) * rows).sum(1) / area.clamp_min(1e-6)
        present = (area / (MIN_AREA * height * width)).clamp(max=1.0).view(n, frames)
        centers = torch.stack([center_x, center_y], -1).view(n, frames, 2)
        painted = (images * mask[:, None]).sum((2, 3)).view(n, frames, 3).sum(1)
        color = painted / area.view(n, frames).sum(1).clamp_min(1e-6)[:, None]
        errors = (color[:, None] - self._palette).square().mean(-1)
        return errors, displacement(centers, present), present.mean(1)

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> RewardScores:
        wanted = torch.tensor([expected(p, m) for p, m in zip(prompts, metadata, strict=True)])
        errors, moved, presence = self.measure(images)
        along = moved @ self._directions.T
        rows = torch.arange(len(wanted))
        color = torch.softmax(-errors / COLOR_TEMPERATURE, -1)[rows, wanted[:, 0]]
        direction = torch.softmax(along / MOTION_TEMPERATURE, -1)[rows, wanted[:, 1]]
        right = (errors.argmin(-1) == wanted[:, 0]) & (along.argmax(-1) == wanted[:, 1])
        right &= (presence > 0.5) & (along[rows, wanted[:, 1]] > MIN_MOTION)
        return RewardScores((color * direction * presence).double(), right)
