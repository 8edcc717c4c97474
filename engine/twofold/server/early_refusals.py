"""What a full server says to a request that has come whole, before h11, a task or a route sees it.

At ten times the capacity nine requests of ten are refused on the loop that hands out the others' tokens, in the
interpreter that their steps wait for. Only what is plain HTTP/1.1 in one piece is read here; the rest goes its usual
way and gets the same answer.
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
"""Names in lower case."""

COMPUTING_PATHS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
)
"""Of the requests that a full server refuses, all of them POST."""
_FIRST_LINES: Final = {f"POST {path} HTTP/1.1".encode(): path for path in COMPUTING_PATHS}
_FIELD: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t -~\x80-\xff]*)")
_LEFT_TO_H11: Final = frozenset((b"transfer-encoding", b"expect", b"upgrade"))


@dataclass(frozen=True)
class WholeRequest:
    """A request that asks for an answer, its body not looked at."""

    path: str
    headers: Headers
    closes: bool
    """Whether its client wants the connection to end with the answer."""


@dataclass(frozen=True)
class EarlyRefusals:
    """What a listening layer asks of the application."""

    is_full: Callable[[], bool]
    """Whether no request would be taken now; asked before anything is read."""
    refuse: Callable[[str, Headers], Response | None]
    """The refusal of a POST to a path, as the application would have made it."""

    def answer(self, request: WholeRequest) -> bytes | None:
        """All bytes of the refusal; None: the application is to be asked."""
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
    """What `data` is, if it is one request to be computed from its first byte to its last, and in no way unusual."""
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
