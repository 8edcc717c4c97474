"""What gateway and replica tell each other beside the HTTP request and its response."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from twofold.api.request_origin import RoutedBy

Header = tuple[bytes, bytes]

ROUTING_HEADER: Final = b"x-twofold-routing"
"""The replica's secret, a space, and a `GatewayRouting`."""
TOKENS_BEGIN: Final = b"\0"
"""Comes before the first token of a replica's stream. Earlier bytes are pings. No API sends it: JSON escapes it."""


def is_stream(headers: Iterable[Header]) -> bool:
    """Whether a response with these headers is sent token by token."""
    kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
    return kind.partition(b";")[0] in (b"text/event-stream", b"application/x-ndjson")


@dataclass
class RoutedRequest:
    """A request that the gateway describes to the router, which fills in its choice."""

    labels: tuple[bytes, ...] = ()
    """See `prefix_labels`."""
    model: str = ""
    """The model that the body names; empty: the default."""
    attempt: int = 0
    """Replicas that were lost before they answered it."""
    gateway: str = ""
    """Id of the gateway that counts it."""
    routed_by: RoutedBy = "load"
    """Why the router chose the replica."""
    replicas: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """All replicas that the router chose from: by id, their `url` and `secret`."""
    end: Callable[[bool], None] = lambda is_lost: None
    """To be called when the replica has answered, or with True when it was lost."""

    def header(self, client: tuple[str, int] | None, secret: str) -> str:
        """Value of `ROUTING_HEADER`."""
        labels = [label.hex() for label in self.labels]
        return f"{secret} {json.dumps([self.gateway, self.routed_by, client, labels])}"


class GatewayRouting(NamedTuple):
    """Routing information that a gateway sends to a replica."""

    gateway: str
    routed_by: RoutedBy
    client: tuple[str, int] | None
    """Address of the gateway's client."""
    labels: tuple[bytes, ...]

    @classmethod
    def read(cls, encoded: bytes) -> GatewayRouting:
        gateway, routed_by, client, labels = json.loads(encoded)
        return cls(gateway, routed_by, client and tuple(client), tuple(map(bytes.fromhex, labels)))
