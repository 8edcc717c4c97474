"""When a request arrived: its stopwatch in the ASGI scope, and how long its first bytes waited in the kernel."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import MutableMapping
from typing import Any, Final

from twofold.api.request_times import RequestTimes

_SCOPE_KEY: Final = "twofold.times"
_LAST_DATA_RECV: Final = struct.Struct("<52xI") if sys.byteorder == "little" else struct.Struct(">52xI")
"""`tcpi_last_data_recv` of Linux's struct tcp_info: milliseconds since data last arrived."""


def kernel_wait_s(connection: Any) -> float:
    """Seconds since data last arrived at a TCP socket; 0 where the system does not tell.

    A busy event loop reads a request late. The client has been waiting since the kernel got it. The resolution is that
    of the kernel's clock, 1 to 10 ms, and right on average.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECV.size)
        return float(_LAST_DATA_RECV.unpack(info)[0]) * 1e-3
    except (AttributeError, OSError, struct.error):
        return 0.0


def begin_times(scope: MutableMapping[str, Any], times: RequestTimes) -> None:
    """Attach the stopwatch of a request to its scope."""
    scope[_SCOPE_KEY] = times


def times_of(scope: MutableMapping[str, Any]) -> RequestTimes:
    """The request's stopwatch. It starts now where another server than ours received the request."""
    found = scope.setdefault(_SCOPE_KEY, RequestTimes.begin())
    assert isinstance(found, RequestTimes)
    return found
