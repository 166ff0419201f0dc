# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""JSON over HTTP with retries, a deadline and a bearer token, for rewards computed elsewhere."""

import importlib.util
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from megatron_leangrpo.rewards.base import RewardUnavailableError
from megatron_leangrpo.rewards.wire import TOKEN_VARIABLE

INSTALL_LINE = "pip install 'megatron_leangrpo[serve]'"
MAX_ANSWER_BYTES = 16 * 2**20
MAX_WAIT_SECONDS = 10.0

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ConnectionSettings:
    """Where a server is and how patient its clients are."""

    section: ClassVar[str]
    """Of the configuration, for messages."""
    server: ClassVar[str]
    refusals: ClassVar[tuple[int, ...]]
    """Statuses that are about the pictures or prompts sent, so others may well be scored."""

    url: str
    timeout_seconds: float = 60.0
    deadline_seconds: float = 300.0
    retries: int = 10
    token_variable: str = TOKEN_VARIABLE

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"{self.section}.url = {self.url!r} must start with http:// or https://"
            )
        for name in ("timeout_seconds", "deadline_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{self.section}.{name} = {value} must be above 0")
        if self.retries < 0:
            raise ValueError(f"{self.section}.retries = {self.retries} must be 0 or more")


class TryAgain(Exception):
    """What another attempt may cure."""


class Busy(TryAgain):
    """The server works and has no room yet: waiting for it is no failed attempt."""


class Connection:
    """The connections to one server; may be used by several threads."""

    def __init__(self, settings: ConnectionSettings) -> None:
        missing = [m for m in ("httpx", "tenacity") if importlib.util.find_spec(m) is None]
        if missing:
            raise ValueError(f"{settings.section} needs {' and '.join(missing)}: {INSTALL_LINE}")
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
            raise ValueError(f"{settings.section}.url = {settings.url!r}: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def with_retries(self, attempt: Callable[[float], Answer]) -> Answer:
        """What `attempt(end)` returns, tried again on TryAgain with growing random pauses.

        An attempt must end by `end`, of `time.monotonic`.
        """
        import tenacity

        settings = self.settings
        deadline = time.monotonic() + settings.deadline_seconds
        failures = 0

        def used_up(state: tenacity.RetryCallState) -> bool:
            nonlocal failures
            failures += not isinstance(state.outcome.exception(), Busy)
            return failures > settings.retries

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(TryAgain),
            stop=tenacity.stop_any(used_up, tenacity.stop_before_delay(settings.deadline_seconds)),
            wait=tenacity.wait_random_exponential(multiplier=0.25, max=MAX_WAIT_SECONDS),
            reraise=True,
        )
        try:
            return retrying(
                lambda: attempt(min(time.monotonic() + settings.timeout_seconds, deadline))
            )
        except TryAgain as error:
            tries = retrying.statistics.get("attempt_number", 1)
            raise RewardUnavailableError(
                f"no score from {settings.server}: {error} (the last of {tries} attempts)"
            ) from error

    def request(self, method: str, path: str, end: float, body: bytes | None = None) -> dict:
        """One attempt that ends by `end`: the answer's JSON object."""
        import httpx

        left = end - time.monotonic()
        if left <= 0:
            raise TryAgain("no time left")
        headers = {"Content-Type": "application/json"}
        received = bytearray()
        try:
            with self._client.stream(
                method, path, content=body, headers=headers, timeout=left
            ) as response:
                for piece in response.iter_bytes():
                    received += piece
                    if len(received) > MAX_ANSWER_BYTES:
                        raise TryAgain(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
                    # httpx limits the silence between two pieces, not their sum.
                    if time.monotonic() > end:
                        raise TryAgain("timed out in the middle of an answer")
        except httpx.HTTPError as error:
            raise TryAgain(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        if response.status_code != 200:
            self._raise_for_status(response.status_code, bytes(received))
        return _json_object(bytes(received))

    def _raise_for_status(self, status: int, content: bytes) -> None:
        try:
            error = json.loads(content)["error"]
            message = f"{status} {error['code']}: {error['message']}"
        except (ValueError, LookupError, TypeError, RecursionError):
            message = f"status {status}"
        if status == 429:
            raise Busy(message)
        if status == 408 or status >= 500:
            raise TryAgain(message)
        refused = f"{self.settings.server} refused the request: {message}"
        raise (RuntimeError if status in self.settings.refusals else RewardUnavailableError)(
            refused
        )


def _json_object(content: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} in the answer")

    try:
        answer = json.loads(content, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise TryAgain(f"an answer that is not JSON: {error}") from error
    if not isinstance(answer, dict):
        raise TryAgain("an answer that is no JSON object")
    return answer
