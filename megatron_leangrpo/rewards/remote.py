# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A reward that `leangrpo serve-reward` computes on another machine.

An answer counts only if it repeats the request's id and has one finite number an image; anything
else is asked for again until the retries or the deadline are used up.
"""

import importlib.util
import json
import math
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_leangrpo.rewards.base import RewardScores, RewardUnavailableError
from megatron_leangrpo.rewards.wire import FORMATS, TOKEN_VARIABLE, encode_picture

if TYPE_CHECKING:
    pass

INSTALL_LINE = "pip install 'megatron_leangrpo[serve]'"
MAX_ANSWER_BYTES = 16 * 2**20
MAX_WAIT_SECONDS = 10.0


@dataclass(frozen=True)
class RemoteSettings:
    """Where the reward server is and how patient its clients are (`reward.remote`)."""

    url: str
    timeout_seconds: float = 60.0
    deadline_seconds: float = 300.0
    retries: int = 10
    token_variable: str = TOKEN_VARIABLE

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"reward.remote.url = {self.url!r} must start with http:// or https://"
            )
        for name in ("timeout_seconds", "deadline_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"reward.remote.{name} = {value} must be above 0")
        if self.retries < 0:
            raise ValueError(f"reward.remote.retries = {self.retries} must be 0 or more")


class _TryAgain(Exception):
    """What another attempt may cure."""


class _Busy(_TryAgain):
    """The server works and has no room yet: waiting for it is no failed attempt."""


class RewardServer:
    """The connection to one server, shared by its rewards."""

    def __init__(self, settings: RemoteSettings) -> None:
        missing = [m for m in ("httpx", "tenacity") if importlib.util.find_spec(m) is None]
        if missing:
            raise ValueError(f"reward.remote needs {' and '.join(missing)}: {INSTALL_LINE}")
        import httpx

        self.settings = settings
        token = os.environ.get(settings.token_variable)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            # Neither proxies nor .netrc of the environment, nor a redirect, may see the token.
            self._client: httpx.Client = httpx.Client(
                base_url=settings.url, headers=headers, trust_env=False, follow_redirects=False
            )
        except httpx.InvalidURL as error:
            raise ValueError(f"reward.remote.url = {settings.url!r}: {error}") from error
        self._description: dict[str, Any] | None = None

    def describe(self) -> dict[str, Any]:
        """The server's rewards and limits, asked for once."""
        if self._description is None:
            self._description = self._with_retries(lambda end: self._once("GET", "rewards", end))
        return self._description

    def score(self, reward: str, request: dict[str, Any]) -> RewardScores:
        """Send pictures, prompts and metadata and return their scores."""
        return self._with_retries(lambda end: self._score_once(reward, request, end))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _with_retries(self, attempt) -> Any:
        import tenacity

        settings = self.settings
        deadline = time.monotonic() + settings.deadline_seconds
        failures = 0

        def used_up(state: tenacity.RetryCallState) -> bool:
            nonlocal failures
            failures += not isinstance(state.outcome.exception(), _Busy)
            return failures > settings.retries

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_TryAgain),
            stop=tenacity.stop_any(used_up, tenacity.stop_before_delay(settings.deadline_seconds)),
            wait=tenacity.wait_random_exponential(multiplier=0.25, max=MAX_WAIT_SECONDS),
            reraise=True,
        )
        try:
            return retrying(
                lambda: attempt(min(time.monotonic() + settings.timeout_seconds, deadline))
            )
        except _TryAgain as error:
            tries = retrying.statistics.get("attempt_number", 1)
            raise RewardUnavailableError(
                f"no score from the reward server: {error} (the last of {tries} attempts)"
            ) from error

    def _score_once(self, reward: str, request: dict[str, Any], end: float) -> RewardScores:
        left = max(end - time.monotonic(), 0.001)
        identity = uuid.uuid4().hex
        body = {**request, "id": identity, "reward": reward, "timeout_seconds": left}
        answer = self._once("POST", "score", end, json.dumps(body, allow_nan=False).encode())
        if answer.get("id") != identity or answer.get("reward") != reward:
            raise _TryAgain("the answer belongs to another request")
        return parse_scores(answer, len(request["prompts"]))

    def _once(self, method: str, path: str, end: float, body: bytes | None = None) -> dict:
        """One attempt that ends by `end`: the answer's JSON object."""
        import httpx

        left = end - time.monotonic()
        if left <= 0:
            raise _TryAgain("no time left")
        headers = {"Content-Type": "application/json"}
        received = bytearray()
        try:
            with self._client.stream(
                method, path, content=body, headers=headers, timeout=left
            ) as response:
                for piece in response.iter_bytes():
                    received += piece
                    if len(received) > MAX_ANSWER_BYTES:
                        raise _TryAgain(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
                    # httpx limits the silence between two pieces, not their sum.
                    if time.monotonic() > end:
                        raise _TryAgain("timed out in the middle of an answer")
        except httpx.HTTPError as error:
            raise _TryAgain(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        if response.status_code != 200:
            _raise_for_status(response.status_code, bytes(received))
        return _json_object(bytes(received))


def parse_scores(answer: dict[str, Any], count: int) -> RewardScores:
    """Scores and verdicts of an answer, or _TryAgain if they are not what was asked for."""
    scores, correct = answer.get("scores"), answer.get("correct")
    if not isinstance(scores, list) or len(scores) != count:
        raise _TryAgain(f"not a list of {count} scores")
    if not all(type(score) in (int, float) and math.isfinite(score) for score in scores):
        raise _TryAgain("scores that are not finite numbers")
    if correct is None:
        return RewardScores(torch.tensor(scores, dtype=torch.float64))
    right = isinstance(correct, list) and len(correct) == count
    if not right or not all(type(verdict) is bool for verdict in correct):
        raise _TryAgain(f"not a list of {count} verdicts")
    return RewardScores(torch.tensor(scores, dtype=torch.float64), torch.tensor(correct))


def _json_object(content: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} in the answer")

    try:
        answer = json.loads(content, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise _TryAgain(f"an answer that is not JSON: {error}") from error
    if not isinstance(answer, dict):
        raise _TryAgain("an answer that is no JSON object")
    return answer


def _raise_for_status(status: int, content: bytes) -> None:
    try:
        error = json.loads(content)["error"]
        message = f"{status} {error['code']}: {error['message']}"
    except (ValueError, LookupError, TypeError, RecursionError):
        message = f"status {status}"
    if status == 429:
        raise _Busy(message)
    if status == 408 or status >= 500:
        raise _TryAgain(message)
    if status == 422:
        # These pictures or prompts, so others may well be scored.
        raise RuntimeError(f"the reward server refused the request: {message}")
    raise RewardUnavailableError(f"the reward server refused the request: {message}")


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
        """Raise ValueError if the server cannot be reached or has no such reward."""
        try:
            self.verdict = self._described()[0].get("verdict")
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
