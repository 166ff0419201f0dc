# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A reward that `leangrpo serve-reward` computes on another machine.

An answer counts only if it repeats the request's id and has one finite number an image; anything
else is asked for again until the retries or the deadline are used up.
"""

import json
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_leangrpo.rewards.base import RewardScores, RewardUnavailableError
from megatron_leangrpo.rewards.connection import Connection, ConnectionSettings, TryAgain
from megatron_leangrpo.rewards.wire import FORMATS, encode_picture

PROMPTS_AT_ONCE = 1000


@dataclass(frozen=True)
class RemoteSettings(ConnectionSettings):
    """Where the reward server is and how patient its clients are (`reward.remote`)."""

    section: ClassVar[str] = "reward.remote"
    server: ClassVar[str] = "the reward server"
    refusals: ClassVar[tuple[int, ...]] = (422,)


class RewardServer(Connection):
    """The connection to one server, shared by its rewards."""

    def __init__(self, settings: RemoteSettings) -> None:
        super().__init__(settings)
        self._description: dict[str, Any] | None = None

    def describe(self) -> dict[str, Any]:
        """The server's rewards and limits, asked for once."""
        if self._description is None:
            self._description = self.with_retries(lambda end: self.request("GET", "rewards", end))
        return self._description

    def score(self, reward: str, request: dict[str, Any]) -> RewardScores:
        """Send pictures, prompts and metadata and return their scores."""
        return self.with_retries(lambda end: self._score_once(reward, request, end))

    def check_prompts(self, request: dict[str, Any]) -> str | None:
        """What the server's reward says is wrong with prompts."""
        try:
            body = json.dumps(request, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RuntimeError(f"metadata that JSON cannot carry: {error}") from error
        answer = self.with_retries(lambda end: self.request("POST", "prompts", end, body))
        problem = answer.get("problem")
        return None if problem is None else str(problem)

    def _score_once(self, reward: str, request: dict[str, Any], end: float) -> RewardScores:
        left = max(end - time.monotonic(), 0.001)
        identity = uuid.uuid4().hex
        body = {**request, "id": identity, "reward": reward, "timeout_seconds": left}
        answer = self.request("POST", "score", end, json.dumps(body, allow_nan=False).encode())
        if answer.get("id") != identity or answer.get("reward") != reward:
            raise TryAgain("the answer belongs to another request")
        return parse_scores(answer, len(request["prompts"]))


def parse_scores(answer: dict[str, Any], count: int) -> RewardScores:
    """Scores and verdicts of an answer, or TryAgain if they are not what was asked for."""
    scores, correct = answer.get("scores"), answer.get("correct")
    if not isinstance(scores, list) or len(scores) != count:
        raise TryAgain(f"not a list of {count} scores")
    if not all(type(score) in (int, float) and math.isfinite(score) for score in scores):
        raise TryAgain("scores that are not finite numbers")
    if correct is None:
        return RewardScores(torch.tensor(scores, dtype=torch.float64))
    right = isinstance(correct, list) and len(correct) == count
    if not right or not all(type(verdict) is bool for verdict in correct):
        raise TryAgain(f"not a list of {count} verdicts")
    return RewardScores(torch.tensor(scores, dtype=torch.float64), torch.tensor(correct))


class RemoteReward:
    """One reward of a server; like any other reward to those who call it."""

    def __init__(self, name: str, server: RewardServer) -> None:
        self.name, self.server = name, server
        self.verdict: str | None = None

    @property
    def takes_videos(self) -> bool:
        """Whether the server's reward scores videos."""
        return bool(self._described()[0].get("takes_videos", False))

    def validate(self, prompts: Sequence[Any], source: object) -> None:
        """Raise ValueError if there is no such server or reward, or for what it cannot score."""
        try:
            described = self._described()[0]
            self.verdict = described.get("verdict")
            if not described.get("checks_prompts"):
                return
            for start in range(0, len(prompts), PROMPTS_AT_ONCE):
                some = prompts[start : start + PROMPTS_AT_ONCE]
                request = {
                    "reward": self.name,
                    "source": str(source),
                    "lines": [prompt.id for prompt in some],
                    "prompts": [prompt.text for prompt in some],
                    "metadata": [prompt.metadata for prompt in some],
                }
                problem = self.server.check_prompts(request)
                if problem is not None:
                    raise ValueError(problem)
        except RuntimeError as error:
            url = self.server.settings.url
            raise ValueError(f"reward {self.name!r}, reward.remote.url = {url}: {error}") from error

    def _described(self) -> tuple[dict[str, Any], dict[str, int]]:
        """What the server says about this reward, and its limits."""
        description = self.server.describe()
        try:
            rewards, limits = description["rewards"], description["limits"]
            limits = {k: int(limits[k]) for k in ("max_images", "max_pixels", "max_body_bytes")}
            if self.name in rewards and rewards[self.name]["pictures"] in FORMATS:
                return rewards[self.name], limits
            known = ", ".join(rewards)
        except (LookupError, TypeError, ValueError) as error:
            raise RewardUnavailableError(
                "the answer is not that of a reward server of leangrpo"
            ) from error
        raise RewardUnavailableError(
            f"the server has no reward {self.name!r} that this version can use; it serves {known}"
        )

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> RewardScores:
        described, limits = self._described()
        frames = images.shape[1] if images.ndim == 5 else None
        samples = [
            [encode_picture(frame, described["pictures"]) for frame in video]
            for video in (images[:, None] if frames is None else images)
        ]
        answers = []
        for rows in _requests(samples, limits):
            request = {
                "pictures": [picture for sample in samples[rows] for picture in sample],
                "prompts": list(prompts[rows]),
                "metadata": list(metadata[rows]),
            }
            if frames is not None:
                request["frames"] = frames
            answers.append(self.server.score(self.name, request))
        verdicts = [answer.correct for answer in answers if answer.correct is not None]
        return RewardScores(
            torch.cat([answer.scores for answer in answers]),
            torch.cat(verdicts) if len(verdicts) == len(answers) else None,
        )


def _requests(samples: Sequence[list[dict[str, Any]]], limits: dict[str, int]) -> list[slice]:
    """Consecutive samples, each of one picture or more, that fit into one request.

    A sample that is too large goes alone.
    """
    slices, start, size, pixels = [], 0, 0, 0
    for index, pictures in enumerate(samples):
        # Prompt and metadata are small beside the pictures.
        bytes_here = sum(len(picture["data"]) for picture in pictures) + 4096
        pixels_here = sum(picture["height"] * picture["width"] for picture in pictures)
        full = (
            (index - start + 1) * len(pictures) > limits["max_images"]
            or size + bytes_here > limits["max_body_bytes"]
            or pixels + pixels_here > limits["max_pixels"]
        )
        if index > start and full:
            slices.append(slice(start, index))
            start, size, pixels = index, 0, 0
        size, pixels = size + bytes_here, pixels + pixels_here
    return [*slices, slice(start, len(samples))]


def remote_rewards(names: Sequence[str], settings: RemoteSettings) -> dict[str, RemoteReward]:
    """The named rewards of one server."""
    server = RewardServer(settings)
    return {name: RemoteReward(name, server) for name in names}
