# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The judge behind a chat endpoint: a small server that answers as vLLM does, and wrongly."""

import base64
import io
import json
import math
import random

import pytest
import torch
from PIL import Image

from megatron_leangrpo.config import JudgeConfig, RewardConfig

for package in ("httpx", "tenacity", "uvicorn"):
    pytest.importorskip(package)

from megatron_leangrpo.grpo.run_reward import build_run_reward  # noqa: E402
from megatron_leangrpo.rewards import RewardError  # noqa: E402
from megatron_leangrpo.rewards.connection import TryAgain  # noqa: E402
from megatron_leangrpo.rewards.vlm_judge import _tokens, parse_score  # noqa: E402
from tests.rewards.http_server import TOKEN, serve  # noqa: E402

# Grey pictures whose level, 1 to 5, is the score that the judge gives.
LEVELS = [3, 1, 5, 2, 4, 3]
IMAGES = torch.stack([torch.full((3, 8, 12), level / 5) for level in LEVELS])
PROMPTS = [f"caption {n}" for n in range(len(LEVELS))]
NOTHING = [{}] * len(LEVELS)


class Endpoint:
    """Scores a picture by its brightness; a share of the answers is spoilt."""

    FAULTS = ("status_500", "status_503", "busy", "truncated", "not_json", "no_choices", "null")

    def __init__(self, share=0.0, logprobs=None, text="Final Score: {}", token=None):
        self.share, self.logprobs, self.text, self.token = share, logprobs, text, token
        self.random, self.spoilt, self.questions = random.Random(0), 0, []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        status, content = self.answer(scope, body)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": content})

    def answer(self, scope, body):
        if self.token and dict(scope["headers"]).get(b"authorization") != self.token.encode():
            error = {"message": "wrong token", "type": "auth", "code": 401}
            return 401, json.dumps({"error": error}).encode()
        if scope["path"] == "/v1/models":
            return 200, json.dumps({"data": [{"id": "judge-7b"}, {"id": "other"}]}).encode()
        assert scope["path"] == "/v1/chat/completions"
        question = json.loads(body)
        self.questions.append(question)
        picture, text = question["messages"][0]["content"]
        assert "caption" in text["text"]
        content = base64.b64decode(picture["image_url"]["url"].partition("base64,")[2])
        level = round(Image.open(io.BytesIO(content)).getpixel((0, 0))[0] / 255 * 5)
        answer = self.text.format(level)
        choice = {"message": {"role": "assistant", "content": answer}}
        if self.logprobs:
            choice["logprobs"] = self.logprobs(answer, level)
        good = json.dumps({"choices": [choice]}).encode()
        return self.spoil(good) if self.random.random() < self.share else (200, good)

    def spoil(self, good):
        self.spoilt += 1
        fault = self.random.choice(self.FAULTS)
        spoilt = {
            "status_500": (500, b"Internal Server Error"),
            "status_503": (503, b""),
            "busy": (429, b'{"error": {"message": "slow down", "code": null}}'),
            "truncated": (200, good[: len(good) // 2]),
            "not_json": (200, b"<html>gateway</html>"),
            "no_choices": (200, b'{"choices": []}'),
            "null": (200, b'{"choices": [{"message": {"content": null}}]}'),
        }
        return spoilt[fault]


def judge(url, policy="raise", **options):
    options = {"model": "judge-7b", "timeout_seconds": 20, "retries": 30} | options
    return build_run_reward(
        RewardConfig(
            weights={"vlm_judge": 1.0},
            failure_policy=policy,
            judge=JudgeConfig(url=f"{url}/v1", **options),
        )
    )


def hesitating(answer, level):
    """Log-probabilities of an answer whose judge wavers between its score and the one above."""
    others = [(str(level), 0.5), (f" {level + 1}", 0.2), (str(level + 1), 0.05), ("the", 0.2)]
    top = [{"token": t, "logprob": math.log(p)} for t, p in others]
    words = [{"token": t, "logprob": 0.0, "top_logprobs": []} for t in ("Final", " Score:", " ")]
    return {
        "content": [*words, {"token": str(level), "logprob": math.log(0.5), "top_logprobs": top}]
    }


def test_every_picture_gets_its_own_score_through_injected_failures(monkeypatch):
    monkeypatch.setenv("LEANGRPO_JUDGE_TOKEN", TOKEN)
    monkeypatch.setattr("megatron_leangrpo.rewards.connection.MAX_WAIT_SECONDS", 0.05)
    endpoint = Endpoint(share=0.4, token=f"Bearer {TOKEN}")
    with serve(endpoint) as url:
        reward = judge(url)
        reward.validate([], "prompts.txt")
        for _ in range(10):
            scores = reward(IMAGES, PROMPTS, NOTHING).total
            assert scores.tolist() == [level / 5 for level in LEVELS]
    assert endpoint.spoilt > 10
    assert {question["model"] for question in endpoint.questions} == {"judge-7b"}


def test_a_video_is_judged_by_some_frames():
    video = torch.stack([IMAGES[0], IMAGES[1], IMAGES[2]])[None]
    with serve(Endpoint()) as url:
        reward = judge(url)
        reward.frame_interval = 2
        assert reward(video, PROMPTS[:1], [{}]).total.tolist() == [(3 + 5) / 2 / 5]


def test_the_score_is_the_mean_over_the_probabilities_of_its_token():
    with serve(Endpoint(logprobs=hesitating)) as url:
        scores = judge(url)(IMAGES[:2], PROMPTS[:2], NOTHING[:2]).total
    # 0.5 for the level, 0.25 for the next one; "the" is no score. There is no 6.
    torch.testing.assert_close(scores * 5, torch.tensor([3.0, 1.0]).double() + 0.25 / 0.75)


def test_an_answer_without_a_score_follows_the_failure_policy():
    with serve(Endpoint(text="It is lovely, {} of 5.")) as url:
        with pytest.raises(RewardError, match=r"has no 'Final Score: N' from 1 to 5"):
            judge(url)(IMAGES, PROMPTS, NOTHING)
        result = judge(url, "drop_group")(IMAGES[:2], PROMPTS[:2], NOTHING[:2])
    assert result.total.isnan().all() and len(result.failures) == 2


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Final Score: 4", 4.0),
        ("Sharp and right.\nFinal Score:3.5", 3.5),
        (" 2\n", 2.0),
        ("Final Score: 6", None),
        ("Final Score: 0", None),
        ("Final Score: -3", None),
        ("Final Score: 3 ... Final Score: 4", None),
        ("Final Score: nan", None),
        ("4/5", None),
        ("", None),
    ],
)
def test_scores_are_parsed_strictly(text, score):
    if score is None:
        with pytest.raises(RuntimeError, match="judge's answer has no"):
            parse_score({"text": text, "tokens": []})
    else:
        assert parse_score({"text": text, "tokens": []}) == score


def test_probabilities_are_left_alone_where_the_score_is_no_single_token():
    tokens = [("Final Score:", []), (" 3", [(" 3", -0.1), (" 4", -2.0)]), (".5", [])]
    assert parse_score({"text": "Final Score: 3.5", "tokens": tokens}) == 3.5
    for logprob in (math.nan, 1.0):
        top = [{"token": "3", "logprob": logprob}]
        with pytest.raises(TryAgain, match="are none"):
            _tokens({"content": [{"token": "3", "top_logprobs": top}]})


def test_wrong_settings_are_named(monkeypatch):
    with pytest.raises(ValueError, match=r"needs reward.judge.url and reward.judge.model"):
        build_run_reward(RewardConfig(weights={"vlm_judge": 1.0}))
    with pytest.raises(ValueError, match=r"reward.judge.model is not set"):
        judge("http://127.0.0.1:9", model=None)
    with pytest.raises(ValueError, match=r"reward.judge.prompt = 'How is it\?' must contain"):
        judge("http://127.0.0.1:9", prompt="How is it?")
    refused = pytest.raises(ValueError, match=r"reward.judge.url = .*401: wrong token")
    with serve(Endpoint(token="Bearer other")) as url, refused:
        judge(url).validate([], "prompts.txt")
    with serve(Endpoint()) as url, pytest.raises(ValueError, match="'judge-8b' is not served"):
        judge(url, model="judge-8b").validate([], "prompts.txt")
