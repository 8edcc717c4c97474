"""Values in a request's ASGI scope: stopwatch, origin, a router's prefix labels, a hook at the first token, and what
the log says of it: its model and why it was refused.

Also tells how long a request's first bytes waited in the kernel.
"""

from __future__ import annotations

import re
import socket
import struct
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, Final

from twofold.api.request_origin import DIRECT, RequestOrigin
from twofold.api.request_times import RequestTimes

_SCOPE_KEY: Final = "twofold.times"
_LABELS_KEY: Final = "twofold.prefix_labels"
_HOOK_KEY: Final = "twofold.on_answer"
_ORIGIN_KEY: Final = "twofold.origin"
_PROBLEM_KEY: Final = "twofold.problem"
_MODEL_KEY: Final = "twofold.model"
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""https://www.w3.org/TR/trace-context/#traceparent-header"""
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
    """The request's stopwatch. The clock starts now if another server than ours received the request."""
    found = scope.setdefault(_SCOPE_KEY, RequestTimes.begin())
    assert isinstance(found, RequestTimes)
    return found


def set_prefix_labels(scope: MutableMapping[str, Any], labels: tuple[bytes, ...]) -> None:
    """Attach a router's names of the prompt's prefixes (`GenerationRequest.prefix_labels`)."""
    scope[_LABELS_KEY] = labels


def prefix_labels_of(scope: MutableMapping[str, Any]) -> tuple[bytes, ...]:
    """The attached labels; empty without a router."""
    labels: tuple[bytes, ...] = scope.get(_LABELS_KEY, ())
    return labels


def trace_id(traceparent: str) -> str:
    """The trace id of a W3C `traceparent` header; empty if the header is invalid or missing."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found[1] if found and not traceparent.startswith("ff") else ""


def set_origin(scope: MutableMapping[str, Any], origin: RequestOrigin) -> None:
    """Attach how the request reached this process (`GenerationRequest.origin`)."""
    scope[_ORIGIN_KEY] = origin


def origin_of(scope: MutableMapping[str, Any]) -> RequestOrigin:
    """The attached origin; an empty one without trace and router."""
    origin: RequestOrigin = scope.get(_ORIGIN_KEY, DIRECT)
    return origin


def set_problem(scope: MutableMapping[str, Any], status: int, problem: str) -> None:
    """Attach why the request failed, without any text of the request."""
    scope[_PROBLEM_KEY] = status, problem


def problem_of(scope: MutableMapping[str, Any]) -> tuple[int, str]:
    """The attached status and reason; (0, "") for a request that did not fail."""
    problem: tuple[int, str] = scope.get(_PROBLEM_KEY, (0, ""))
    return problem


def set_model(scope: MutableMapping[str, Any], name: str) -> None:
    """Attach the model's name as the client sent it."""
    scope[_MODEL_KEY] = name


def model_of(scope: MutableMapping[str, Any]) -> str:
    """The attached name; empty if the request named none."""
    name: str = scope.get(_MODEL_KEY, "")
    return name


def set_answer_hook(scope: MutableMapping[str, Any], hook: Callable[[], None]) -> None:
    """Attach a function that a stream calls before it sends its first tokens."""
    scope[_HOOK_KEY] = hook


def call_answer_hook(scope: MutableMapping[str, Any]) -> None:
    """Call the attached function, if there is one."""
    hook: Callable[[], None] | None = scope.get(_HOOK_KEY)
    if hook is not None:
        hook()
