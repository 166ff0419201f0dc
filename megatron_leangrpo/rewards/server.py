# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The HTTP interface of rewards: JSON in, JSON out, nothing is unpickled.

GET /health is open; GET /rewards, POST /prompts and POST /score want the bearer token. Every
refusal is `{"error": {"code": ..., "message": ...}}`.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from torch import Tensor

from megatron_leangrpo.rewards.base import Reward, RewardScores
from megatron_leangrpo.rewards.batching import Batcher, ExpiredError, Job
from megatron_leangrpo.rewards.registry import takes_videos
from megatron_leangrpo.rewards.requests import (
    ApiError,
    Picture,
    PromptsRequest,
    ScoreRequest,
    read_request,
)
from megatron_leangrpo.rewards.wire import decode_picture

BODY_SECONDS = 60.0


@dataclass(frozen=True)
class Limits:
    """What a server accepts."""

    max_requests: int = 32
    """Requests being read, waiting or being scored; the next one gets 429."""
    max_body_bytes: int = 64 * 2**20
    max_images: int = 64
    """Of one request."""
    max_pixels: int = 16 * 2**20
    """Of all images of a request together."""
    max_batch: int = 64
    """Images of several requests scored in one call."""


def create_app(
    rewards: Mapping[str, Reward], token: str | None = None, limits: Limits | None = None
) -> FastAPI:
    """The server's application; `token` None leaves it open to everybody who can reach it."""
    limits = limits or Limits()
    service = _Service(rewards, token, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.batcher = Batcher(rewards, limits.max_batch)
        yield
        await run_in_threadpool(service.batcher.close)

    app = FastAPI(title="leangrpo rewards", lifespan=lifespan, openapi_url=None)
    app.add_exception_handler(ApiError, lambda _, error: error.response())
    app.add_exception_handler(
        HTTPException,
        lambda _, error: ApiError(error.status_code, "http", str(error.detail)).response(),
    )
    app.add_exception_handler(
        Exception,
        lambda _, error: ApiError(500, "internal", type(error).__name__).response(),
    )
    app.add_api_route("/health", service.health, methods=["GET"])
    app.add_api_route("/rewards", service.describe, methods=["GET"])
    app.add_api_route("/prompts", service.check_prompts, methods=["POST"])
    app.add_api_route("/score", service.score, methods=["POST"], response_model=None)
    return app


class _Service:
    """The three routes."""

    def __init__(self, rewards: Mapping[str, Reward], token: str | None, limits: Limits) -> None:
        self.rewards, self.token, self.limits = dict(rewards), token, limits
        self.batcher: Batcher | None = None
        self.in_flight = 0

    async def health(self) -> dict[str, Any]:
        """Whether the server is up, and how busy."""
        return {
            "status": "ok",
            "requests": self.in_flight,
            "max_requests": self.limits.max_requests,
        }

    async def describe(self, request: Request) -> dict[str, Any]:
        """The rewards by name, the picture format that each wants, and the limits."""
        self._authorize(request)
        described = {
            name: {
                "pictures": "png" if getattr(reward, "rounds_pixels", False) else "float32",
                "verdict": getattr(reward, "verdict", None),
                "takes_videos": takes_videos(reward),
                "checks_prompts": hasattr(reward, "validate"),
            }
            for name, reward in self.rewards.items()
        }
        return {"rewards": described, "limits": asdict(self.limits)}

    async def check_prompts(self, request: Request) -> dict[str, str | None]:
        """What is wrong with prompts that a reward could never score; null if nothing is."""
        with self._admitted(request):
            body = await self._read(request)
            return {"problem": await run_in_threadpool(self._problem, body)}

    async def score(self, request: Request) -> JSONResponse:
        """Score the pictures of one request."""
        with self._admitted(request):
            body = await self._read(request)
            content, job = await run_in_threadpool(self._parse, body)
            del body
            assert self.batcher is not None
            self.batcher.submit(job)
            return _answer(content, await self._result(job))

    @contextmanager
    def _admitted(self, request: Request) -> Iterator[None]:
        self._authorize(request)
        if self.in_flight >= self.limits.max_requests:
            raise ApiError(429, "queue_full", f"{self.in_flight} requests are in hand already")
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def _authorize(self, request: Request) -> None:
        if self.token is None:
            return
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise ApiError(401, "unauthorized", "the bearer token is missing or wrong")

    async def _read(self, request: Request) -> bytes:
        """The body, never more of it than the limit."""
        limit = self.limits.max_body_bytes
        too_long = ApiError(413, "body_too_large", f"a body may have {limit} bytes")
        declared = request.headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared) > limit:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in request.stream():
                    body += piece
                    if len(body) > limit:
                        raise too_long
        except TimeoutError as error:
            raise ApiError(408, "slow_body", f"no whole body in {BODY_SECONDS} s") from error
        return bytes(body)

    def _problem(self, body: bytes) -> str | None:
        content = read_request(PromptsRequest, body)
        check = getattr(self._reward(content.reward), "validate", None)
        if check is None:
            return None
        if not len(content.lines) == len(content.prompts) == len(content.metadata):
            raise ApiError(422, "bad_request", "lines, prompts and metadata differ in number")
        rows = zip(content.lines, content.prompts, content.metadata, strict=True)
        try:
            prompts = [SimpleNamespace(id=n, text=text, metadata=more) for n, text, more in rows]
            check(prompts, content.source)
        except ValueError as error:
            return str(error)
        return None

    def _reward(self, name: str) -> Reward:
        if name not in self.rewards:
            known = ", ".join(self.rewards)
            raise ApiError(404, "unknown_reward", f"no reward {name!r}; known: {known}")
        return self.rewards[name]

    def _parse(self, body: bytes) -> tuple[ScoreRequest, Job]:
        content = read_request(ScoreRequest, body)
        self._check(content)
        job = Job(
            content.reward,
            _decode(content.pictures, content.frames),
            content.prompts,
            content.metadata,
            time.monotonic() + content.timeout_seconds,
        )
        return content, job

    def _check(self, content: ScoreRequest) -> None:
        """Raise ApiError for what could not be scored, before any picture is decoded."""
        pictures, limits = content.pictures, self.limits
        wants_videos = takes_videos(self._reward(content.reward))
        if wants_videos != (content.frames is not None):
            wanted = "videos: frames must be set" if wants_videos else "pictures: no frames"
            raise ApiError(422, "bad_request", f"{content.reward} scores {wanted}")
        count = len(content.prompts)
        if len(pictures) != count * (content.frames or 1) or len(content.metadata) != count:
            counts = f"{len(pictures)}, {count} and {len(content.metadata)}"
            videos = "" if content.frames is None else f" for videos of {content.frames} frames"
            raise ApiError(422, "bad_request", f"{counts} pictures, prompts and metadata{videos}")
        if len(pictures) > limits.max_images:
            raise ApiError(413, "too_many_images", f"a request may have {limits.max_images} images")
        if sum(picture.height * picture.width for picture in pictures) > limits.max_pixels:
            message = f"the images of a request may have {limits.max_pixels} pixels"
            raise ApiError(413, "too_many_pixels", message)
        if len({(p.format, p.height, p.width) for p in pictures}) > 1:
            message = "the images of a request must have one size and format"
            raise ApiError(422, "bad_request", message)

    async def _result(self, job: Job) -> RewardScores:
        try:
            return await asyncio.wrap_future(job.result)
        except ExpiredError as error:
            raise ApiError(503, "expired", str(error)) from error
        except asyncio.CancelledError as error:
            if job.result.cancelled():
                raise ApiError(503, "closing", "the server is going down") from error
            raise
        except Exception as error:
            raise ApiError(422, "reward_failed", f"{type(error).__name__}: {error}") from error


def _decode(pictures: list[Picture], frames: int | None) -> Tensor:
    """Images [n, 3, H, W], or videos [n, frames, 3, H, W]."""
    images = []
    for index, picture in enumerate(pictures):
        try:
            images.append(
                decode_picture(picture.format, picture.height, picture.width, picture.data)
            )
        except ValueError as error:
            raise ApiError(422, "bad_picture", f"pictures.{index}: {error}") from error
    stacked = torch.stack(images)
    return stacked if frames is None else stacked.unflatten(0, (-1, frames))


def _answer(content: ScoreRequest, result: RewardScores) -> JSONResponse:
    correct = None if result.correct is None else result.correct.tolist()
    return JSONResponse(
        {
            "id": content.id,
            "reward": content.reward,
            "scores": result.scores.tolist(),
            "correct": correct,
        }
    )
