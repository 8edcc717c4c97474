"""Errors in OpenAI's format, and the only mapping from Twofold's errors to HTTP codes.

Body: {"error": {"message", "type", "param", "code"}} where param and code are strings or null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from twofold.api.errors import CapacityError, KernelError, RequestError, TwofoldError, UnusableEngineError
from twofold.server.http.arrival import set_problem

_MAX_ECHO = 200
"""Most characters of a caller's value that an error message repeats."""


_FIELDS_OF_MESSAGES: Final = frozenset(
    (
        *(
            "role",
            "content",
            "type",
            "text",
            "name",
            "id",
            "input",
            "output",
            "image_url",
            "url",
            "source",
            "data",
        ),
        *("tool_calls", "tool_call_id", "function", "arguments", "parameters", "description", "strict"),
        *("json_schema", "schema"),
    )
)
"""Names of fields within a field that the log shows; others may be keys that the client chose."""
CONTEXT_LENGTH: Final = "context_length_exceeded"
CLIENT_CLOSED_REQUEST: Final = 499
"""nginx's status for a client that has gone; HTTP has none."""


class ApiError(Exception):
    """An error answer, ready to send."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        logged: str = "",
    ) -> None:
        """logged: what the log says instead of the message, where that quotes the request."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.logged = logged or message

    @property
    def kind(self) -> str:
        """The error's type, by its status."""
        if self.status >= 500:
            return "server_error"
        return "rate_limit_error" if self.status == 429 else "invalid_request_error"

    def arguments(self) -> dict[str, Any]:
        """Constructor arguments, to rebuild the error in another process."""
        names = ("status", "message", "param", "code", "headers", "logged")
        return {name: getattr(self, name) for name in names}

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, path: str = "") -> JSONResponse:
        """The error as an HTTP response, in the format of the API that the requested path belongs to."""
        status, body = self.status, self.body()
        for prefix, make in _FORMATS.items():
            if f"{path}/".startswith(prefix):
                status, body = make(self)
        return _ErrorResponse(self, body, status)

    def event(self) -> bytes:
        """The error as one server-sent event, for a stream that has already begun."""
        return b"data: " + json.dumps(self.body(), ensure_ascii=False).encode() + b"\n\n"


class _ErrorResponse(JSONResponse):
    """An error as the answer; the request's scope gets its message for the log."""

    def __init__(self, error: ApiError, body: dict[str, Any], status: int) -> None:
        super().__init__(body, status_code=status, headers=error.headers)
        self._problem = error.status, error.logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        set_problem(scope, *self._problem)
        await super().__call__(scope, receive, send)


ErrorFormat = Callable[[ApiError], tuple[int, dict[str, Any]]]
"""Status and body of an error in the format of another API than OpenAI's."""
_FORMATS: Final[dict[str, ErrorFormat]] = {}


def set_error_format(prefix: str, make: ErrorFormat) -> None:
    """Answer errors at and below a path in an API's own format. Called by the API's router."""
    _FORMATS[f"{prefix}/"] = make


def from_twofold(error: TwofoldError) -> ApiError:
    """Convert an engine error to an HTTP error."""
    if isinstance(error, RequestError):
        logged = str(error).replace(error.private, "") if error.private else ""
        return ApiError(400, str(error), param=error.param, logged=logged)
    if isinstance(error, CapacityError):
        seconds = max(1, math.ceil(error.retry_after_s))
        if error.draining or error.asleep:
            return unavailable(str(error), "server_draining" if error.draining else "server_asleep", seconds)
        headers = {"Retry-After": str(seconds)}
        return ApiError(429, str(error), code="rate_limit_exceeded", headers=headers)
    if isinstance(error, UnusableEngineError):
        return unavailable(str(error), error.code, 30)
    return ApiError(
        500, str(error), code="kernel_error" if isinstance(error, KernelError) else "internal_error"
    )


def unavailable(message: str, code: str, retry_after_s: int) -> ApiError:
    """503: a later request may succeed."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after_s)})


def wrong_field(param: str, problem: str) -> ApiError:
    """400 for one field of a request."""
    return ApiError(400, f"{param}: {problem}", param=param)


def from_validation(error: ValidationError) -> ApiError:
    """The first validation error of a request body, with the field and the given value."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        problem = _lower(first["msg"])
        return ApiError(400, f"the request body is not valid JSON ({problem})", code="invalid_json")
    param = _path(first["loc"])
    message = _lower(first["msg"].removeprefix("Value error, "))
    if first["type"] == CONTEXT_LENGTH:
        return ApiError(400, message, param=param.partition("[")[0], code=CONTEXT_LENGTH)
    if not param:
        return ApiError(400, f"the request body is not as expected: {message}")
    given = "" if first["type"] == "missing" else f" (given: {_echo(first['input'])})"
    # Keys of the client's own objects stay out of the log.
    top, *deeper = first["loc"]
    named = (top, *(part for part in deeper if isinstance(part, int) or part in _FIELDS_OF_MESSAGES))
    logged = f"{_path(named)}: {message}"
    return ApiError(400, f"{param}: {message}{given}", param=param, logged=logged)


def too_long(num_tokens: int, max_context: int, reason: str = "") -> str:
    """Error text for a prompt that exceeds the context; agents recognise its beginning and shorten the prompt."""
    return (
        f"prompt is too long: {num_tokens} tokens > {max_context - 1} maximum; the context holds {max_context}, one of "
        "which the answer needs; shorten the prompt" + (f" ({reason})" if reason else "")
    )


def internal() -> ApiError:
    return ApiError(
        500, "an internal error occurred; the server's log has the details", code="internal_error"
    )


async def answer_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def answer_twofold_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TwofoldError)
    return from_twofold(error).response(request.url.path)


async def answer_disconnect(request: Request, _error: Exception) -> JSONResponse:
    """For logs and metrics: the client disconnected before its body was complete and will not read this."""
    message = "the client disconnected before its request was complete"
    return ApiError(CLIENT_CLOSED_REQUEST, message, code="client_closed_request").response(request.url.path)


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
