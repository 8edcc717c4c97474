"""What gateway and replica send each other: one request down, the parts of its response up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from twofold.api.request_origin import RoutedBy

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
    model: str = ""
    """The model that the body names; empty: the default."""
    attempt: int = 0
    """Replicas that were lost before they answered it."""
    matched_by: tuple[str, ...] = ()
    """Ids of the replicas that the router chose from because they hold a prefix; set by the router."""

    def routed_by(self, replica: str) -> RoutedBy:
        """Why the router chose the replica of this id."""
        if self.attempt:
            return "retry"
        return "prefix" if replica in self.matched_by else "load"


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


@dataclass(frozen=True)
class WholeResponse:
    """A response in one piece, of a route that streams nothing."""

    replica: str
    status: int
    headers: tuple[Header, ...]
    body: bytes
