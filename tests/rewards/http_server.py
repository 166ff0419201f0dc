# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A reward server on a thread of the test, and the faults a network can add to it."""

import asyncio
import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

TOKEN = "a-token-for-tests-only"


@contextmanager
def serve(app) -> Iterator[str]:
    """Run an application on a free port; yields its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            started.set()

    server = Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        assert started.wait(30)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


class Faults:
    """Wraps an application and spoils a share of the answers of POST /score.

    Every fault is one that a careless client would take for a score or never get over.
    """

    NAMES = (
        "slow",
        "status_500",
        "truncated",
        "not_json",
        "too_few",
        "text_scores",
        "nan",
        "infinite",
        "other_id",
        "dropped",
    )

    def __init__(self, app, share: float, seed: int = 0, stall_seconds: float = 60.0) -> None:
        self.app, self.share = app, share
        self.stall_seconds = stall_seconds
        self.random = random.Random(seed)
        self.counts = dict.fromkeys(self.NAMES, 0)

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] != "/score":
            return await self.app(scope, receive, send)
        if self.random.random() >= self.share:
            return await self.app(scope, receive, send)
        fault = self.random.choice(self.NAMES)
        self.counts[fault] += 1
        sent = []

        async def keep(message):
            sent.append(message)

        await self.app(scope, receive, keep)
        await getattr(self, f"_{fault}", self._spoil)(fault, sent, receive, send)

    async def _slow(self, fault, sent, receive, send):
        """Answers only after the client has gone, as far as it may."""
        try:
            async with asyncio.timeout(self.stall_seconds):
                while (await receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            pass

    async def _dropped(self, fault, sent, receive, send):
        """Closes the connection in the middle of an answer."""
        body = b"".join(message.get("body", b"") for message in sent)
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body[: len(body) // 2]})

    async def _spoil(self, fault, sent, receive, send):
        body = b"".join(message.get("body", b"") for message in sent)
        status = 200
        if fault == "status_500":
            status, body = 500, b"Internal Server Error"
        elif fault == "truncated":
            body = body[: len(body) // 2]
        elif fault == "not_json":
            body = b"<html>gateway</html>"
        else:
            answer = json.loads(body)
            if "scores" in answer:
                scores = answer["scores"]
                answer["scores"] = {
                    "too_few": scores[1:],
                    "text_scores": [str(score) for score in scores],
                    "nan": [float("nan"), *scores[1:]],
                    "infinite": [float("inf"), *scores[1:]],
                    "other_id": [score + 1 for score in scores],
                }[fault]
            if fault == "other_id":
                answer["id"] = "0" * 32
            body = json.dumps(answer).encode()
        headers = [
            (b"content-length", str(len(body)).encode()),
            (b"content-type", b"application/json"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
