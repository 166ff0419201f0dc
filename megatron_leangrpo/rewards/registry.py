# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Rewards by name, and their weighted sum."""

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_leangrpo.rewards.base import (
    ModelSettings,
    Reward,
    RewardError,
    RewardScores,
    RewardUnavailableError,
)

# Takes nothing, or `settings: ModelSettings`.
Factory = Callable[..., Reward]
FailurePolicy = Literal["raise", "drop_group"]

_FACTORIES: dict[str, Factory] = {}
# Imported on first use; each registers the names it defines.
_BUILT_IN = (
    "aesthetic",
    "clip_score",
    "color_motion",
    "color_shape",
    "geneval",
    "hpsv2",
    "image_reward",
    "jpeg",
    "motion",
    "ocr",
    "ocr_recognizer",
    "pickscore",
    "video_align",
    "vlm_judge",
)


def register_reward(name: str) -> Callable[[Factory], Factory]:
    """Decorator: make a class or function known under a name.

    It is called without arguments, or with `settings=ModelSettings(...)` if it takes that.
    """

    def add(factory: Factory) -> Factory:
        if name in _FACTORIES:
            raise ValueError(f"reward {name!r} is registered twice")
        _FACTORIES[name] = factory
        return factory

    return add


def reward_names() -> list[str]:
    """All registered names, sorted."""
    for module in _BUILT_IN:
        importlib.import_module(f"megatron_leangrpo.rewards.{module}")
    return sorted(_FACTORIES)


def make_reward(name: str, settings: ModelSettings | None = None) -> Reward:
    """Build one reward.

    `package.module:name` or `path/to/file.py:name` is one from outside the package: a factory, or a
    function of (images, prompts, metadata) that is the reward itself.
    """
    if ":" in name:
        module, _, attribute = name.rpartition(":")
        try:
            found = getattr(_import(module), attribute)
        except Exception as error:
            raise ValueError(
                f"reward.weights: reward {name!r} cannot be imported: "
                f"{type(error).__name__}: {error}"
            ) from error
        if "images" in inspect.signature(found).parameters:
            return found
        return _call(found, settings)
    known = reward_names()
    if name not in _FACTORIES:
        closest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {closest[0]!r}?" if closest else ""
        raise ValueError(
            f"reward.weights: unknown reward {name!r}{hint}; known: {', '.join(known)}, "
            "package.module:name or file.py:name"
        )
    return _call(_FACTORIES[name], settings)


def _import(module: str) -> ModuleType:
    """A module by its name, or by the path of its file."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    path = Path(module).expanduser().resolve()
    spec = importlib.util.spec_from_file_location(f"reward file {path}", path)
    loaded = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up here.
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def _call(factory: Factory, settings: ModelSettings | None) -> Reward:
    if "settings" in inspect.signature(factory).parameters:
        return factory(settings=settings or ModelSettings())
    return factory()


@dataclass
class WeightedScores:
    """The weighted sum, its parts, and the failures that the policy let pass."""

    total: Tensor
    """[n] float64; NaN where a reward failed under `drop_group`."""
    parts: dict[str, Tensor]
    """Unweighted scores [n] float64 of each reward."""
    correct: Tensor | None
    """[n] bool: right for every reward that has a verdict; None if none has."""
    failures: list[RewardError] = field(default_factory=list)


class WeightedReward:
    """A weighted sum of rewards that checks every score.

    `frame_interval` says which frames of a video a reward of images scores: the first and every
    `frame_interval`-th after it, or the first alone if it is 0.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        weights: Mapping[str, float],
        failure_policy: FailurePolicy = "raise",
        frame_interval: int = 4,
    ) -> None:
        if frame_interval < 0:
            raise ValueError(
                f"reward.frame_interval = {frame_interval} must be 0 (the first frame) or more"
            )
        self.rewards, self.weights = dict(rewards), dict(weights)
        self.failure_policy, self.frame_interval = failure_policy, frame_interval

    def validate(self, prompts: Sequence[Any], source: object) -> None:
        """Raise ValueError with file and line for prompts that a reward could never score."""
        for reward in self.rewards.values():
            check = getattr(reward, "validate", None)
            if check is not None:
                check(prompts, source)

    def check_medium(self, videos: bool) -> None:
        """Raise ValueError for a reward that scores videos where a model makes pictures."""
        for name, reward in self.rewards.items():
            if takes_videos(reward) and not videos:
                raise ValueError(
                    f"reward.weights: {name} scores videos, and this model makes pictures"
                )

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> WeightedScores:
        """The scores of images [n, 3, H, W], or of videos [n, frames, 3, H, W]."""
        total = torch.zeros(len(images), dtype=torch.float64)
        result = WeightedScores(total, {}, None)
        for name, reward in self.rewards.items():
            scores = self._score(name, reward, images, prompts, metadata, result.failures)
            result.parts[name] = scores.scores
            total += self.weights[name] * scores.scores
            if scores.correct is not None:
                correct = scores.correct
                result.correct = correct if result.correct is None else result.correct & correct
        return result

    def _score(
        self,
        name: str,
        reward: Reward,
        images: Tensor,
        prompts: Sequence[str],
        metadata: Sequence[dict[str, Any]],
        failures: list[RewardError],
    ) -> RewardScores:
        try:
            if images.ndim == 4 or takes_videos(reward):
                return check_scores(name, reward(images, prompts, metadata), prompts)
            frames = images[:, :: self.frame_interval] if self.frame_interval else images[:, :1]
            return _score_frames(name, reward, frames, prompts, metadata)
        except Exception as error:
            failure = _as_reward_error(name, prompts, error)
            if self.failure_policy == "raise":
                raise failure from error
            nothing_helps = len(images) == 1 or isinstance(error, RewardUnavailableError)
        if nothing_helps:
            failures.append(failure)
            return RewardScores(torch.full((len(images),), torch.nan, dtype=torch.float64))
        # Image by image, so that one failure does not take its neighbours along.
        singles = [
            self._score(
                name, reward, images[i : i + 1], prompts[i : i + 1], metadata[i : i + 1], failures
            )
            for i in range(len(images))
        ]
        verdicts = [
            torch.zeros(1, dtype=torch.bool) if s.correct is None else s.correct for s in singles
        ]
        has_verdict = any(s.correct is not None for s in singles)
        return RewardScores(
            torch.cat([s.scores for s in singles]), torch.cat(verdicts) if has_verdict else None
        )


def takes_videos(reward: Reward) -> bool:
    """Whether a reward scores videos as a whole."""
    return getattr(reward, "takes_videos", False)


def _score_frames(
    name: str,
    reward: Reward,
    frames: Tensor,
    prompts: Sequence[str],
    metadata: Sequence[dict[str, Any]],
) -> RewardScores:
    """Mean scores over frames [n, frames, 3, H, W]; a video is right where all its frames are."""
    count = frames.shape[1]
    each = [index for index in range(len(prompts)) for _ in range(count)]
    texts, extras = [prompts[i] for i in each], [metadata[i] for i in each]
    scores = check_scores(name, reward(frames.flatten(0, 1), texts, extras), texts)
    correct = None if scores.correct is None else scores.correct.view(-1, count).all(1)
    return RewardScores(scores.scores.view(-1, count).mean(1), correct)


def _as_reward_error(name: str, prompts: Sequence[str], error: Exception) -> RewardError:
    if isinstance(error, RewardError):
        return error
    shown = prompts[0] if len(prompts) == 1 else f"{prompts[0]} (one of {len(prompts)})"
    return RewardError(name, shown, f"{type(error).__name__}: {error}")


def check_scores(name: str, output: RewardScores | Tensor, prompts: Sequence[str]) -> RewardScores:
    """One finite float64 score per prompt, or RewardError."""
    if not isinstance(output, RewardScores):
        output = RewardScores(torch.as_tensor(output))
    scores = output.scores.detach().to("cpu", torch.float64)
    if scores.shape != (len(prompts),):
        found = f"scores of shape {tuple(scores.shape)} for {len(prompts)} images"
        raise RewardError(name, prompts[0], found)
    finite = torch.isfinite(scores)
    if not finite.all():
        first = int((~finite).nonzero()[0])
        raise RewardError(name, prompts[first], float(scores[first]))
    correct = None if output.correct is None else output.correct.to("cpu", torch.bool)
    return RewardScores(scores, correct)


def build_reward(
    weights: Mapping[str, float],
    failure_policy: FailurePolicy = "raise",
    settings: ModelSettings | None = None,
    remote: Mapping[str, Reward] | None = None,
    frame_interval: int = 4,
) -> WeightedReward:
    """Build every reward of a `{name: weight}` mapping, except those given as `remote`."""
    if not weights:
        known = ", ".join(reward_names())
        raise ValueError(f"reward.weights is empty; give at least one of {known}")
    for name, weight in weights.items():
        if not torch.isfinite(torch.tensor(float(weight))) or weight == 0:
            raise ValueError(f"reward.weights.{name} = {weight} must be finite and not 0")
    remote = remote or {}
    rewards = {n: remote[n] if n in remote else make_reward(n, settings) for n in weights}
    return WeightedReward(rewards, weights, failure_policy, frame_interval)
