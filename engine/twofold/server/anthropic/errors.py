"""Errors in the shape of Anthropic's API: {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

from typing import Any, Final

from twofold.server.http.errors import ApiError

_OVERLOADED: Final = 529
_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    _OVERLOADED: "overloaded_error",
}


def anthropic_status(status: int) -> int:
    """The HTTP code in Anthropic's API, which has its own for an overloaded server."""
    return _OVERLOADED if status == 503 else status


def anthropic_error(error: ApiError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error."""
    status = anthropic_status(error.status)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return status, {"type": "error", "error": {"type": kind, "message": error.message}}
