# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""HPSv2.1 (a fine-tuned CLIP-H), as DanceGRPO, MixGRPO and Flow-GRPO score with it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron_leangrpo.rewards.base import ModelSettings
from megatron_leangrpo.rewards.clip import Clip, padded_pixels
from megatron_leangrpo.rewards.registry import register_reward

NAME = "hpsv2"


@register_reward(NAME)
class Hpsv2Reward:
    """The cosine itself, without a scale: 0.2 to 0.4 for most pictures."""

    rounds_pixels = True

    def __init__(self, settings: ModelSettings) -> None:
        self._clip = Clip(NAME, settings, padded_pixels)

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        return self._clip.scaled_cosines(images, prompts)[0]
