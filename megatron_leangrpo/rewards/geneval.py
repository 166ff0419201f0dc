# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""GenEval (djghosh13/geneval): are the prompt's objects there, in its number, colours and places?

Mask2Former finds the objects and CLIP tells their colours. Differs: pictures reach the detector in
RGB and lossless; Flow-GRPO's server (yifan123/reward-server) gives it JPEG with red and blue
exchanged.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_leangrpo.rewards.base import (
    ModelSettings,
    RewardScores,
    raise_for_bad_prompts,
    round_to_8_bits,
)
from megatron_leangrpo.rewards.clip import Clip, pillow_pixels
from megatron_leangrpo.rewards.geneval_detector import Detector
from megatron_leangrpo.rewards.geneval_rules import (
    COLORS,
    Detection,
    Objects,
    Task,
    benchmark_correct,
    parse_task,
    partial_score,
)
from megatron_leangrpo.rewards.registry import register_reward
from megatron_leangrpo.rewards.weights import weights_folder

NAME = "geneval"
THRESHOLD, COUNTING_THRESHOLD = 0.3, 0.9
TEMPLATES = ("a photo of a {} {}", "a photo of a {}-colored {}", "a photo of a {} object")
BACKGROUND = 0x99 / 255


@register_reward(NAME)
class GenEvalReward:
    """Flow-GRPO's partial score, at most 1; a picture is right where GenEval's benchmark says so.

    The folder holds `detector` (mask2former-swin-small-coco-instance) and `clip`
    (clip-vit-large-patch14). Prompts need GenEval's metadata: "tag", "include" and "exclude".
    """

    verdict = "right by GenEval"
    rounds_pixels = True

    def __init__(self, settings: ModelSettings) -> None:
        folder = weights_folder(NAME, settings, "detector/config.json", "clip/config.json")
        self._detector = Detector(NAME, folder / "detector", settings)
        clip = replace(settings, paths={NAME: str(folder / "clip")})
        self._clip = Clip(NAME, clip, pillow_pixels)
        self._texts: dict[str, Tensor] = {}

    def validate(self, prompts: Sequence[Any], source: object) -> None:
        """Name file and line of prompts whose metadata GenEval cannot judge."""
        problems = []
        for prompt in prompts:
            try:
                parse_task(prompt.metadata)
            except ValueError as error:
                problems.append((prompt.id, str(error)))
        raise_for_bad_prompts(problems, NAME, source)

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> RewardScores:
        tasks = [parse_task(each) for each in metadata]
        images = round_to_8_bits(images).float() / 255
        thresholds = [COUNTING_THRESHOLD if t.tag == "counting" else THRESHOLD for t in tasks]
        found = zip(images, self._detector.detect(images, thresholds), tasks, strict=True)
        scores, correct = zip(*(self._judge(*each) for each in found), strict=True)
        return RewardScores(torch.tensor(scores, dtype=torch.float64), torch.tensor(correct))

    def _judge(self, image: Tensor, objects: Objects, task: Task) -> tuple[float, bool]:
        seen: dict[int, str] = {}

        def colors_of(name: str, some: Sequence[Detection]) -> list[str]:
            for each in some:
                if id(each) not in seen:
                    seen[id(each)] = self._color(image, each, name)
            return [seen[id(each)] for each in some]

        score = partial_score(task, objects, colors_of)
        return score, benchmark_correct(task, objects, colors_of)

    def _color(self, image: Tensor, found: Detection, name: str) -> str:
        """The colour whose texts are nearest to the object on a grey background."""
        alone = torch.where(found.mask, image, torch.tensor(BACKGROUND))
        left, top, right, bottom = map(int, found.box)
        features = self._clip.image_features(alone[None, :, top:bottom, left:right])
        return COLORS[(features @ self._color_texts(name).T).argmax().item()]

    def _color_texts(self, name: str) -> Tensor:
        """A unit vector [10, d] for each colour of an object: the mean of its three texts."""
        if name not in self._texts:
            texts = [text.format(color, name) for color in COLORS for text in TEMPLATES]
            features = self._clip.text_features(texts).view(len(COLORS), len(TEMPLATES), -1)
            mean = features.mean(1)
            self._texts[name] = mean / mean.norm(dim=-1, keepdim=True)
        return self._texts[name]
