# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What the reward server is asked, and how it refuses."""

from typing import Annotated, Any, Literal, TypeVar

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

Content = TypeVar("Content", bound=BaseModel)


class ApiError(Exception):
    """A refusal with its HTTP status and code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message

    def response(self) -> JSONResponse:
        """The refusal as JSON."""
        headers = {"Retry-After": "1"} if self.status == 429 else None
        content = {"error": {"code": self.code, "message": self.message}}
        return JSONResponse(content, status_code=self.status, headers=headers)


class Picture(BaseModel):
    """One image, as `wire.encode_picture` writes it."""

    model_config = ConfigDict(strict=True, extra="forbid")
    format: Literal["png", "float32"]
    height: Annotated[int, Field(gt=0)]
    width: Annotated[int, Field(gt=0)]
    data: str


class ScoreRequest(BaseModel):
    """The body of POST /score; `id` comes back in the answer."""

    model_config = ConfigDict(strict=True, extra="forbid")
    id: Annotated[str, Field(max_length=64)]
    reward: str
    pictures: Annotated[list[Picture], Field(min_length=1)]
    frames: Annotated[int, Field(gt=0)] | None = None
    """Pictures that make up each video, for rewards of videos."""
    prompts: list[str]
    metadata: list[dict[str, Any]]
    timeout_seconds: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]


class PromptsRequest(BaseModel):
    """The body of POST /prompts: prompts of the file `source`, by the index of their lines."""

    model_config = ConfigDict(strict=True, extra="forbid")
    reward: str
    source: str
    lines: list[int]
    prompts: list[str]
    metadata: list[dict[str, Any]]


def read_request(kind: type[Content], body: bytes) -> Content:
    """A request of its kind; ApiError says what is wrong with it first."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise ApiError(422, "bad_request", f"{where}: {first['msg']}") from error
