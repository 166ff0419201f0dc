# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Soft OCR reward for small one-line pictures: the target's likelihood under PP-OCR's recogniser.

Opens the recogniser's ONNX file inside the rapidocr wheel directly: rapidocr itself pads every
picture to a width of 320, which costs seven times as much, and returns no probabilities.
"""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_leangrpo.rewards.base import RewardScores, raise_for_bad_prompts
from megatron_leangrpo.rewards.ocr import INSTALL_LINE, find_bad_targets, require_ocr
from megatron_leangrpo.rewards.registry import register_reward
from megatron_leangrpo.rewards.text_target import normalize_text, target_text

HEIGHT = 48
FRAME_WIDTH = 8
BATCH = 32
NAME = "ocr_recognizer"


def recognizer_file() -> Path:
    """The PP-OCR recogniser shipped in the rapidocr wheel."""
    spec = importlib.util.find_spec("rapidocr")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "models"
    files = sorted(folder.glob("*_rec_*.onnx"))
    if not files:
        raise ValueError(f"reward {NAME!r}: no *_rec_*.onnx in {folder}; {INSTALL_LINE}")
    return files[-1]


@register_reward(NAME)
class OcrRecognizerReward:
    """exp(-CTC loss) of the target text, in [0, 1]; about 4 ms for a 32 x 32 image on one core."""

    verdict = "read correctly"

    def __init__(self) -> None:
        require_ocr(NAME)
        import onnxruntime

        options = onnxruntime.SessionOptions()
        # One thread: the ranks of a node share its cores.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            str(recognizer_file()), options, providers=["CPUExecutionProvider"]
        )
        characters = self._session.get_modelmeta().custom_metadata_map["character"].splitlines()
        # Class 0 is CTC's blank and the last one is the space.
        self._alphabet = ["", *characters, " "]
        self._index = {character: i for i, character in enumerate(self._alphabet) if character}

    def validate(self, prompts: Sequence[Any], source: object) -> None:
        """Name file and line of prompts without a target, or with characters it cannot read."""
        problems = find_bad_targets(prompts)
        bad = {prompt_id for prompt_id, _ in problems}
        for prompt in (p for p in prompts if p.id not in bad):
            target = target_text(prompt.text, prompt.metadata)
            unknown = [character for character in target if character not in self._index]
            if unknown:
                problems.append((prompt.id, f"the recogniser does not know {unknown[0]!r}"))
        raise_for_bad_prompts(sorted(problems), NAME, source)

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> RewardScores:
        targets = [target_text(p, m) for p, m in zip(prompts, metadata, strict=True)]
        log_probs = self.log_probabilities(images, max(map(len, targets)))
        codes = torch.tensor([self._index[c] for target in targets for c in target])
        lengths = torch.tensor([len(target) for target in targets])
        frames = torch.full_like(lengths, log_probs.shape[1])
        losses = functional.ctc_loss(
            log_probs.transpose(0, 1), codes, frames, lengths, reduction="none"
        )
        read = [normalize_text(text) for text in self.decode(log_probs)]
        correct = [t == normalize_text(target) for t, target in zip(read, targets, strict=True)]
        return RewardScores(losses.neg().exp(), torch.tensor(correct))

    def log_probabilities(self, images: Tensor, target_length: int = 1) -> Tensor:
        """[n, frames, classes], with enough frames for a target of the given length."""
        height, width = images.shape[-2:]
        resized = max(FRAME_WIDTH, math.ceil(HEIGHT * width / height))
        # A CTC path needs a frame per character and one between equal characters, plus some slack.
        padded = max(resized, 2 * FRAME_WIDTH * (target_length + 1))
        padded = math.ceil(padded / FRAME_WIDTH) * FRAME_WIDTH
        pictures = functional.interpolate(
            images.detach().to("cpu", torch.float32), (HEIGHT, resized), mode="bilinear"
        )
        # BGR in [-1, 1], zeros to the right, as the recogniser was trained.
        pictures = functional.pad(pictures.flip(1) * 2 - 1, (0, padded - resized))
        outputs = [
            torch.from_numpy(self._session.run(None, {"x": chunk.numpy()})[0])
            for chunk in pictures.contiguous().split(BATCH)
        ]
        return torch.cat(outputs).clamp_min(1e-30).log()

    def decode(self, log_probs: Tensor) -> list[str]:
        """The most likely character of each frame, repeats and blanks removed."""
        texts = []
        for best in log_probs.argmax(-1):
            codes = torch.unique_consecutive(best).tolist()
            texts.append("".join(self._alphabet[code] for code in codes))
        return texts
