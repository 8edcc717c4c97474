"""Errors in OpenAI's format, and the only mapping from Twofold's errors to HTTP codes.

Body: {"error": {"message", "type", "param", "code"}} where param and code are strings or null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from twofold.api.errors import CapacityError, KernelError, RequestError, TwofoldError
from twofold.server.http.anthropic_errors import anthropic_error, anthropic_status, is_anthropic

_MAX_ECHO = 200
"""Most characters of a caller's value that an error message repeats."""


CONTEXT_LENGTH: Final = "context_length_exceeded"


class ApiError(Exception):
    """An error answer, ready to send."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def arguments(self) -> dict[str, Any]:
        """Constructor arguments, to rebuild the error in another process."""
        names = ("status", "message", "kind", "param", "code", "headers")
        return {name: getattr(self, name) for name in names}

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, path: str = "") -> JSONResponse:
        """The error as an HTTP response. `path`: the requested path; Ollama's clients expect a text, Anthropic's their
        own format."""
        if is_anthropic(path):
            status = anthropic_status(self.status)
            return JSONResponse(
                anthropic_error(status, self.message), status_code=status, headers=self.headers
            )
        body = {"error": self.message} if path.startswith("/api/") else self.body()
        return JSONResponse(body, status_code=self.status, headers=self.headers)

    def event(self) -> bytes:
        """The error as one server-sent event, for a stream that has already begun."""
        return b"data: " + json.dumps(self.body(), ensure_ascii=False).encode() + b"\n\n"


def from_twofold(error: TwofoldError) -> ApiError:
    """Convert an engine error to an HTTP error."""
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, CapacityError):
        retry = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        if error.draining:
            return ApiError(503, str(error), kind="server_error", code="server_draining", headers=retry)
        if error.asleep:
            return ApiError(503, str(error), kind="server_error", code="server_asleep", headers=retry)
        return ApiError(429, str(error), kind="rate_limit_error", code="rate_limit_exceeded", headers=retry)
    code = "kernel_error" if isinstance(error, KernelError) else "internal_error"
    return ApiError(500, str(error), kind="server_error", code=code)


def from_validation(error: ValidationError) -> ApiError:
    """The first validation error of a request body, with the field and the given value."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(
            400, f"the request body is not valid JSON ({_lower(first['msg'])})", code="invalid_json"
        )
    param = _path(first["loc"])
    message = _lower(first["msg"].removeprefix("Value error, "))
    if first["type"] == CONTEXT_LENGTH:
        return ApiError(400, message, param=param.partition("[")[0], code=CONTEXT_LENGTH)
    if not param:
        return ApiError(400, f"the request body is not as expected: {message}")
    given = "" if first["type"] == "missing" else f" (given: {_echo(first['input'])})"
    return ApiError(400, f"{param}: {message}{given}", param=param)


def too_long(num_tokens: int, max_context: int) -> str:
    """Error text for a prompt that exceeds the context; agents recognise its beginning and shorten the prompt."""
    return (
        f"prompt is too long: {num_tokens} tokens > {max_context - 1} maximum; the context holds {max_context}, one of "
        "which the answer needs; shorten the prompt"
    )


def internal() -> ApiError:
    return ApiError(
        500,
        "an internal error occurred; the server's log names it",
        kind="server_error",
        code="internal_error",
    )


async def answer_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def answer_twofold_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TwofoldError)
    return from_twofold(error).response(request.url.path)


async def answer_bug(request: Request, _error: Exception) -> JSONResponse:
    """Answer with 500. Starlette then raises the error again, so that `middleware.RequestFrame` logs it."""
    return internal().response(request.url.path)


async def answer_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Starlette's own 404 and 405."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"there is nothing at {_echo(request.url.path)}; the API is under /v1"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
    else:
        message = str(error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response(request.url.path)


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "content", "str") → "messages[0].content". Tags of unions are not identifiers: left out."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier():
            text += f".{part}" if text else part
    return text


def _echo(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_ECHO else text[:_MAX_ECHO] + "…"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
