"""Fast refusals of a full server, for complete requests, before h11, a task or a route handles them.

At ten times the capacity, nine of ten requests are refused on the loop that delivers the others' tokens, in the
interpreter that their steps wait for. Only plain HTTP/1.1 requests received in one piece are parsed here; all others
take the usual path and get the same answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from starlette.responses import Response

Headers = list[tuple[bytes, bytes]]
"""Header names are in lower case."""

COMPUTING_PATHS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
)
"""Paths that a full server refuses; all are POST."""
_FIRST_LINES: Final = {f"POST {path} HTTP/1.1".encode(): path for path in COMPUTING_PATHS}
_FIELD: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t -~\x80-\xff]*)")
_LEFT_TO_H11: Final = frozenset((b"transfer-encoding", b"expect", b"upgrade"))


@dataclass(frozen=True)
class WholeRequest:
    """A request for an answer; its body is not parsed."""

    path: str
    headers: Headers
    closes: bool
    """Whether its client asks to close the connection after the answer."""


@dataclass(frozen=True)
class EarlyRefusals:
    """The application's callbacks for the listening layer."""

    is_full: Callable[[], bool]
    """Whether every request would be refused now; checked before parsing."""
    refuse: Callable[[str, Headers], Response | None]
    """The refusal of a POST to a path, identical to the application's."""

    def answer(self, request: WholeRequest) -> bytes | None:
        """All bytes of the refusal; None: pass the request to the application."""
        response = self.refuse(request.path, request.headers)
        if response is None:
            return None
        lines = [
            b"HTTP/1.1 %d %b" % (response.status_code, HTTPStatus(response.status_code).phrase.encode()),
            b"date: " + formatdate(usegmt=True).encode(),
            *(b"%b: %b" % header for header in response.raw_headers),
        ]
        if request.closes:
            lines.append(b"connection: close")
        return b"\r\n".join([*lines, b"", bytes(response.body)])


def whole_request(data: bytes) -> WholeRequest | None:
    """Parse `data` if it is exactly one complete, ordinary POST request to a computing path."""
    head, end, body = data.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    path = _FIRST_LINES.get(first)
    if path is None or not end:
        return None
    headers: Headers = []
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            return None
        headers.append((field[1].lower(), field[2].strip(b" \t")))
    values = dict(headers)
    if len(values) < len(headers) or b"host" not in values or not _LEFT_TO_H11.isdisjoint(values):
        return None
    if values.get(b"content-length") != b"%d" % len(body):
        return None
    connection = values.get(b"connection", b"keep-alive").lower()
    if connection not in (b"close", b"keep-alive"):
        return None
    return WholeRequest(path, headers, connection == b"close")
