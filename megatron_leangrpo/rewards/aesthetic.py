# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The improved aesthetic predictor: linear layers on the picture's CLIP-L features."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_leangrpo.rewards.base import ModelSettings
from megatron_leangrpo.rewards.clip import Clip, pillow_pixels
from megatron_leangrpo.rewards.registry import register_reward
from megatron_leangrpo.rewards.weights import (
    check_shapes,
    find_file,
    open_tensors,
    score_head,
    stored_shapes,
    wanted_shapes,
)

NAME = "aesthetic"
HEAD = "sac+logos+ava1-l14-linearMSE"


@register_reward(NAME)
class AestheticReward:
    """Points from 1 to 10, whatever the prompt; about 5 for an average picture.

    The folder holds openai/clip-vit-large-patch14 and the published head beside it.
    """

    rounds_pixels = True

    def __init__(self, settings: ModelSettings) -> None:
        self._clip = Clip(NAME, settings, pillow_pixels)
        width = self._clip.config.projection_dim
        file = find_file(NAME, self._clip.folder, f"{HEAD}.safetensors", f"{HEAD}.pth")
        shapes = wanted_shapes(lambda: nn.ModuleDict({"layers": score_head(width)}))
        check_shapes(NAME, file, stored_shapes(NAME, file), shapes)
        self._head = nn.ModuleDict({"layers": score_head(width)})
        self._head.load_state_dict(open_tensors(NAME, file))
        self._head.float().eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        # The head is too small to be worth a device.
        return self._head["layers"](self._clip.image_features(images)).squeeze(1)
