# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What a reward is, what it returns, and how it fails."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class RewardScores:
    """One score per image, and whether the image is plainly right, where the reward can tell."""

    scores: Tensor
    """[n], higher is better."""
    correct: Tensor | None = None
    """[n] bool"""


@runtime_checkable
class Reward(Protocol):
    """Scores a batch of images; a plain tensor [n] may be returned instead of RewardScores.

    A reward may also have `validate(prompts, source)`, called before the first rollout, which
    raises ValueError for prompts that it could never score, and a text `verdict` that says what a
    correct image is ("read correctly").
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
