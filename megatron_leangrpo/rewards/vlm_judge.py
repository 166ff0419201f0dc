# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A vision-language model as judge, behind an OpenAI-compatible chat endpoint (vLLM, SGLang, ...).

Flow-GRPO's `unifiedreward`: one question a picture, a score from 1 to 5, divided by 5. Where the
endpoint returns the probabilities of the score's token, the score is their mean: a judge that
hesitates between 3 and 4 gives 3.5 and not the same 4 to half of a group.
"""

import json
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_leangrpo.rewards.base import ModelSettings
from megatron_leangrpo.rewards.connection import Connection, ConnectionSettings, TryAgain
from megatron_leangrpo.rewards.registry import register_reward
from megatron_leangrpo.rewards.wire import encode_picture

NAME = "vlm_judge"
LOWEST, HIGHEST = 1, 5
MAX_ANSWER_TOKENS = 512
# The most that OpenAI's interface and vLLM's default allow.
TOP_LOGPROBS = 20
PROMPT = (
    "You are given a text caption and a picture that was generated from it. Judge the picture by "
    "how well it shows what the caption says (objects, their attributes and relations) and by its "
    "quality (clarity, detail, colours, aesthetics). Caption: [{prompt}]\n"
    "Answer with one line: Final Score: N, where N is a number from 1 (worst) to 5 (best)."
)
_SCORE = re.compile(r"Final Score:\s*(-?\d+(?:\.\d+)?)")
_NUMBER = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*")


@dataclass(frozen=True)
class JudgeSettings(ConnectionSettings):
    """Which judge is asked what (`reward.judge`)."""

    section: ClassVar[str] = "reward.judge"
    server: ClassVar[str] = "the judge"
    # 400 is also what endpoints say of a picture or a prompt that is too large.
    refusals: ClassVar[tuple[int, ...]] = (400, 413, 422)

    token_variable: str = "LEANGRPO_JUDGE_TOKEN"
    model: str | None = None
    prompt: str | None = None
    concurrency: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ValueError("reward.judge.model is not set; give the name the endpoint knows")
        if self.prompt is not None and "{prompt}" not in self.prompt:
            raise ValueError(
                f"reward.judge.prompt = {self.prompt!r} must contain {{prompt}}, where the prompt "
                "of the picture goes"
            )
        if self.concurrency < 1:
            raise ValueError(f"reward.judge.concurrency = {self.concurrency} must be 1 or more")


def judge_settings(settings: ModelSettings) -> JudgeSettings:
    """The judge of a run; ValueError if it has none."""
    if settings.judge is None:
        raise ValueError(
            f"reward {NAME!r} needs reward.judge.url and reward.judge.model: an OpenAI-compatible "
            "endpoint, such as http://host:8000/v1, and its name for the model"
        )
    return settings.judge


@register_reward(NAME)
class VlmJudge:
    """The judge's score over 5: 0.2 to 1."""

    rounds_pixels = True

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = judge_settings(settings)
        self._connection = Connection(self.settings)

    def validate(self, prompts: Sequence[Any], source: object) -> None:
        """Raise ValueError if the endpoint cannot be reached or does not have the model."""
        url, model = self.settings.url, self.settings.model
        try:
            answer = self._connection.with_retries(
                lambda end: self._connection.request("GET", "models", end)
            )
            names = [entry["id"] for entry in answer["data"]]
        except RuntimeError as error:
            raise ValueError(f"reward {NAME!r}, reward.judge.url = {url}: {error}") from error
        except (LookupError, TypeError) as error:
            raise ValueError(
                f"reward {NAME!r}: reward.judge.url = {url} lists no models as an "
                "OpenAI-compatible endpoint does; its address often ends in /v1"
            ) from error
        if model not in names:
            raise ValueError(
                f"reward.judge.model = {model!r} is not served by {url}; valid: {', '.join(names)}"
            )

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        with ThreadPoolExecutor(self.settings.concurrency, "judge") as threads:
            scores = list(threads.map(self._score, images, prompts))
        return torch.tensor(scores, dtype=torch.float64)

    def _score(self, image: Tensor, prompt: str) -> float:
        body = json.dumps(self._question(image, prompt)).encode()
        choice = self._connection.with_retries(lambda end: self._ask(body, end))
        return parse_score(choice) / HIGHEST

    def _ask(self, body: bytes, end: float) -> dict[str, Any]:
        answer = self._connection.request("POST", "chat/completions", end, body)
        try:
            (choice,) = answer["choices"]
            text = choice["message"]["content"]
        except (LookupError, TypeError, ValueError) as error:
            raise TryAgain("not the answer of a chat endpoint") from error
        if not isinstance(text, str):
            raise TryAgain("an answer without text")
        return {"text": text, "tokens": _tokens(choice.get("logprobs"))}

    def _question(self, image: Tensor, prompt: str) -> dict[str, Any]:
        picture = f"data:image/png;base64,{encode_picture(image, 'png')['data']}"
        question = (self.settings.prompt or PROMPT).replace("{prompt}", prompt)
        content = [
            {"type": "image_url", "image_url": {"url": picture}},
            {"type": "text", "text": question},
        ]
        return {
            "model": self.settings.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": MAX_ANSWER_TOKENS,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
        }


Token = tuple[str, list[tuple[str, float]]]


def _tokens(logprobs: Any) -> list[Token]:
    """Each token of an answer and its alternatives with their log-probabilities, if there."""
    if not logprobs or not logprobs.get("content"):
        return []
    try:
        tokens = [
            (entry["token"], [(t["token"], float(t["logprob"])) for t in entry["top_logprobs"]])
            for entry in logprobs["content"]
        ]
    except (LookupError, TypeError, ValueError) as error:
        raise TryAgain("log-probabilities in another form") from error
    if any(math.isnan(value) or value > 1e-3 for _, others in tokens for _, value in others):
        raise TryAgain("log-probabilities that are none")
    return tokens


def parse_score(choice: dict[str, Any]) -> float:
    """The one score of an answer, from 1 to 5; RuntimeError if it has none."""
    match = _find(choice["text"])
    value = float(match[1]) if match else math.nan
    if not LOWEST <= value <= HIGHEST:
        raise RuntimeError(
            f"the judge's answer has no 'Final Score: N' from {LOWEST} to {HIGHEST}: "
            f"{choice['text']!r:.200}"
        )
    return _mean_of_alternatives(choice["tokens"], match[1]) or value


def _find(text: str) -> re.Match | None:
    """The number of an answer; none where there are several scores or other text alone."""
    found = list(_SCORE.finditer(text))
    return found[0] if len(found) == 1 else None if found else _NUMBER.fullmatch(text)


def _mean_of_alternatives(tokens: list[Token], number: str) -> float | None:
    """The mean of the whole numbers that could stand in the number's place, if it is one token."""
    match = _find("".join(token for token, _ in tokens))
    if match is None or match[1] != number:
        return None
    start = 0
    for token, alternatives in tokens:
        if start <= match.start(1) < start + len(token):
            weights = dict.fromkeys(map(str, range(LOWEST, HIGHEST + 1)), 0.0)
            for text, logprob in alternatives:
                if text.strip() in weights:
                    weights[text.strip()] += math.exp(logprob)
            total = sum(weights.values())
            if token.strip() != number or weights[number] == 0:
                return None
            return sum(int(value) * weight for value, weight in weights.items()) / total
        start += len(token)
    return None
