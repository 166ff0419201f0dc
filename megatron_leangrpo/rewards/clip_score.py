# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""CLIPScore at Flow-GRPO's scale; meant for openai/clip-vit-large-patch14."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron_leangrpo.rewards.base import ModelSettings
from megatron_leangrpo.rewards.clip import Clip, bilinear_pixels
from megatron_leangrpo.rewards.registry import register_reward

NAME = "clip_score"
DIVISOR = 30


@register_reward(NAME)
class ClipScoreReward:
    """Logit scale (100) x cosine / 30: near 1 for a picture of its prompt."""

    def __init__(self, settings: ModelSettings) -> None:
        self._clip = Clip(NAME, settings, bilinear_pixels)

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        cosines, scale = self._clip.scaled_cosines(images, prompts)
        return scale * cosines / DIVISOR
