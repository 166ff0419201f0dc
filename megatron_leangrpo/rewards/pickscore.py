# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""PickScore (yuvalkirstain/PickScore_v1, a CLIP-H) at Flow-GRPO's scale."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron_leangrpo.rewards.base import ModelSettings
from megatron_leangrpo.rewards.clip import Clip, pillow_pixels
from megatron_leangrpo.rewards.registry import register_reward

NAME = "pickscore"
DIVISOR = 26


@register_reward(NAME)
class PickScoreReward:
    """Logit scale (100) x cosine / 26: near 0.8 for most pictures."""

    rounds_pixels = True

    def __init__(self, settings: ModelSettings) -> None:
        self._clip = Clip(NAME, settings, pillow_pixels)

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        cosines, scale = self._clip.scaled_cosines(images, prompts)
        return scale * cosines / DIVISOR
