# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""OCR rewards for pictures and videos of any size: PP-OCR finds and reads, Flow-GRPO's rules."""

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_leangrpo.rewards.base import RewardScores, raise_for_bad_prompts, round_to_8_bits
from megatron_leangrpo.rewards.registry import register_reward
from megatron_leangrpo.rewards.text_target import (
    edit_score,
    normalize_text,
    string_score,
    target_text,
)

INSTALL_LINE = "pip install 'megatron_leangrpo[ocr]'"
VIDEO_FRAME_INTERVAL = 4


def ocr_available() -> bool:
    """Whether the [ocr] extra is installed; imports nothing."""
    return all(importlib.util.find_spec(name) is not None for name in ("rapidocr", "onnxruntime"))


def require_ocr(reward: str) -> None:
    """ValueError with the install line if the [ocr] extra is missing."""
    if not ocr_available():
        raise ValueError(f"reward {reward!r} needs rapidocr and onnxruntime: {INSTALL_LINE}")


def find_bad_targets(prompts: Sequence[Any]) -> list[tuple[int, str]]:
    """(prompt id, problem) of every prompt without a text to be written."""
    problems = []
    for prompt in prompts:
        try:
            target_text(prompt.text, prompt.metadata)
        except ValueError as error:
            problems.append((prompt.id, f"{error}: {prompt.text!r}"))
    return problems


@register_reward("ocr")
class OcrReward:
    """Flow-GRPO's text-rendering reward; about 0.26 s for a 512 x 512 image on one core."""

    verdict = "read correctly"
    rounds_pixels = True

    name = "ocr"

    def __init__(self) -> None:
        require_ocr(self.name)
        from rapidocr import RapidOCR

        # One thread: the ranks of a node share its cores.
        self._engine = RapidOCR(
            params={
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Global.log_level": "critical",
            }
        )

    def validate(self, prompts: Sequence[Any], source: object) -> None:
        """Name file and line of prompts without a text to be written."""
        raise_for_bad_prompts(find_bad_targets(prompts), self.name, source)

    def read(self, image: Tensor) -> str:
        """All text found in one image [3, H, W] in [0, 1], in reading order."""
        pixels = round_to_8_bits(image)
        # OpenCV's order: height, width, BGR.
        array = pixels.flip(0).permute(1, 2, 0).contiguous().numpy()
        return "".join(getattr(self._engine(array), "txts", None) or ())

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> RewardScores:
        scores, correct = [], []
        for image, prompt, extra in zip(images, prompts, metadata, strict=True):
            target, text = target_text(prompt, extra), self.read(image)
            scores.append(string_score(text, target))
            correct.append(normalize_text(text) == normalize_text(target))
        return RewardScores(torch.tensor(scores, dtype=torch.float64), torch.tensor(correct))


@register_reward("video_ocr")
class VideoOcrReward(OcrReward):
    """Flow-GRPO's: every fourth frame is read, and frames that score above 0 are averaged."""

    name = "video_ocr"
    takes_videos = True

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> RewardScores:
        scores, correct = [], []
        for video, prompt, extra in zip(images, prompts, metadata, strict=True):
            target = target_text(prompt, extra)
            texts = [self.read(frame) for frame in video[::VIDEO_FRAME_INTERVAL]]
            positive = [score for text in texts if (score := edit_score(text, target)) > 0]
            scores.append(sum(positive) / len(positive) if positive else 0.0)
            correct.append(all(normalize_text(text) == normalize_text(target) for text in texts))
        return RewardScores(torch.tensor(scores, dtype=torch.float64), torch.tensor(correct))
