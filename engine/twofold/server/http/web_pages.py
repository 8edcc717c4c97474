"""Protects a server without a key from web pages.

A page in the user's browser can reach 127.0.0.1 too: by a form or fetch (recognised by `Origin`), or by a name of its
own that resolves there (DNS rebinding, recognised by `Host`). Programs send neither a foreign Host nor an Origin.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from twofold.api.addresses import ip_address, is_loopback
from twofold.api.config import ServerConfig
from twofold.server.http.errors import ApiError

_AUTHORITY: Final = re.compile(r"(?:\[([^]@]*)]|([^:@/\[\]]*))(?::\d*)?")


def cross_origin_error(headers: Headers, config: ServerConfig) -> ApiError | None:
    """The refusal of a request that a web page may have made; None for a local request."""
    host = headers.get("host")
    # Browsers always send Host; HTTP/1.0 programs may not.
    if host is not None and not _is_known(_name_of(host), config):
        return ApiError(
            403,
            f"the Host header is {host[:200]!r}, which is no local name; call the server by its address or as "
            "localhost, start it with --allowed-hosts NAME, or with --api-key",
            code="host_not_allowed",
        )
    origin = headers.get("origin")
    if origin is not None and not _is_local_origin(origin, host) and origin not in config.allowed_origins:
        return ApiError(
            403,
            f"the Origin header is {origin[:200]!r}; without --api-key no web page of another site may call this "
            "server; start it with --allowed-origins ORIGIN to let that page in",
            code="origin_not_allowed",
        )
    return None


def _is_known(name: str, config: ServerConfig) -> bool:
    if is_loopback(name) or name in {known.lower() for known in (config.host, *config.allowed_hosts)}:
        return True
    # An address cannot be rebound. A server that listens on loopback only has just loopback addresses, though.
    return not is_loopback(config.host) and ip_address(name) is not None


def _is_local_origin(origin: str, host: str | None) -> bool:
    parts = urlsplit(origin)
    if parts.scheme not in ("http", "https"):
        # "null": a sandboxed frame or a file.
        return False
    return (host is not None and parts.netloc.lower() == host.lower()) or is_loopback(_name_of(parts.netloc))


def _name_of(authority: str) -> str:
    """The host of "host:port", lower case and without brackets; empty for anything else, such as "user@host"."""
    found = _AUTHORITY.fullmatch(authority.strip().lower())
    return (found[1] or found[2]).rstrip(".") if found else ""
