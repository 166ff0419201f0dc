# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a reward is, what it returns, and how it fails."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_leangrpo.rewards.vlm_judge import JudgeSettings


@dataclass(frozen=True)
class RewardScores:
    """One score per sample, and whether it is plainly right, where the reward can tell."""

    scores: Tensor
    """[n], higher is better."""
    correct: Tensor | None = None
    """[n] bool"""


@runtime_checkable
class Reward(Protocol):
    """Scores a batch of images; a plain tensor [n] may be returned instead of RewardScores.

    A reward with `takes_videos = True` gets videos [n, frames, 3, H, W] instead, and none with
    pictures; of a video, other rewards get some frames, whose scores are averaged.

    A reward may also have `validate(prompts, source)`, called before the first rollout, which
    raises ValueError for prompts that it could never score, a text `verdict` that says what a
    correct image is ("read correctly"), and `rounds_pixels = True` if the first thing that it does
    is to round them to 8 bits: pictures then travel to a server as PNG.
    """

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> RewardScores | Tensor:
        """Images are [n, 3, H, W] in [0, 1]."""
        ...


class RewardError(RuntimeError):
    """A reward raised, or returned something that is not one finite number per image."""

    def __init__(self, name: str, prompt: str, value: object) -> None:
        self.name, self.prompt, self.value = name, prompt, value
        super().__init__(f"reward {name!r} gave {value} for prompt {prompt!r}")


class RewardUnavailableError(RuntimeError):
    """A reward can score nothing at all, whatever the images; one by one would not help."""


@dataclass(frozen=True)
class ModelSettings:
    """Where rewards find their weights and how they run, for factories that take `settings`."""

    paths: Mapping[str, str] = field(default_factory=dict)
    """Reward name to the folder of its weights."""
    device: str | torch.device = "cpu"
    batch_size: int = 16
    """Images in one forward of a reward model."""
    offload: bool = False
    """Keep the models in host memory and move them to the device only while they score."""
    judge: "JudgeSettings | None" = None
    """The endpoint that vlm_judge asks."""


def round_to_8_bits(images: Tensor) -> Tensor:
    """Images in [0, 1] as the bytes of a picture file, on the host."""
    return (images.detach().clamp(0, 1) * 255).round().to("cpu", torch.uint8)


def raise_for_bad_prompts(
    problems: Sequence[tuple[int, str]], reward: str, source: object, shown: int = 5
) -> None:
    """Raise ValueError listing `file:line: problem` for (prompt id, problem) pairs, if any."""
    if not problems:
        return
    lines = [f"{source}:{prompt_id + 1}: {problem}" for prompt_id, problem in problems[:shown]]
    if len(problems) > shown:
        lines.append(f"... and {len(problems) - shown} more")
    raise ValueError(f"reward {reward!r} cannot score these prompts:\n" + "\n".join(lines))
