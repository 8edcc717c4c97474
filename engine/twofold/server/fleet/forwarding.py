"""What gateway and replica send each other: one request down, the parts of its response up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class ForwardedRequest:
    """One HTTP request, read completely."""

    method: str
    path: str
    query: bytes
    headers: tuple[Header, ...]
    body: bytes
    client: tuple[str, int] | None = None
    labels: tuple[bytes, ...] = ()
    """See `prefix_labels`."""


class ResponseStart(NamedTuple):
    """Status and headers, before any part of the body."""

    status: int
    headers: tuple[Header, ...]


class BodyPart(NamedTuple):
    """Bytes of the body.

    preface: sent before the first token, and obsolete if another replica answers instead. ping: keeps a silent
    connection open. answer: everything else.
    """

    kind: Literal["preface", "ping", "answer"]
    data: bytes
