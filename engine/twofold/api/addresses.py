"""Network addresses. Imports no other Twofold module."""

from __future__ import annotations

import ipaddress
import re


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """`host` as an address; None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether an address or a name is one of this machine's own."""
    address, name = ip_address(host), host.lower().rstrip(".")
    return address.is_loopback if address is not None else name == "localhost" or name.endswith(".localhost")


def without_password(url: str) -> str:
    """A URL that may be shown: `***` stands for its password."""
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", url)
