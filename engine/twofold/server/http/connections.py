"""One connection: uvicorn's HTTP/1.1 over h11, plus the deadlines that it lacks.

uvicorn times only a kept-alive connection without a byte of the next request. Here every state has a time limit: no
request yet, a request head that drips, an unread body, an answer that its client does not read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from twofold.api.request_times import RequestTimes
from twofold.server.http.arrival import begin_times, kernel_wait_s

_logger = logging.getLogger("twofold.server")
_SMALL_READ: Final = 4 * 1024
_LARGE_READ: Final = 64 * 1024
_MAX_REFUSED: Final = 32
_REFUSAL_S: Final = 1.0
_LOG_EVERY_S: Final = 1.0
_TWO_FRAMINGS: Final = {b"content-length", b"transfer-encoding"}


class _Http11(h11.Connection):
    """h11 with its own framing of body chunks: 0.4 us each, where h11 takes 20 us for every token of a stream.

    h11 frames the first chunk of an answer; its output shows whether the later chunks are framed the same way.
    """

    _in_chunks = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """See h11. A body framed in two ways is refused: a proxy may see another request in it (RFC 9112, 6.1)."""
        event = super().next_event()
        if type(event) is h11.Request and {name for name, _ in event.headers} >= _TWO_FRAMINGS:
            raise h11.RemoteProtocolError("Content-Length together with Transfer-Encoding")
        return event

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if type(event) is not h11.Data or not event.data:
            self._in_chunks = False
            return super().send(event)
        chunk = b"%x\r\n%b\r\n" % (len(event.data), event.data)
        if self._in_chunks and self.our_state is h11.SEND_BODY:
            return chunk
        output = super().send(event)
        self._in_chunks = output == chunk
        return output


@dataclass(frozen=True)
class ConnectionLimits:
    """Most connections, and how long each may wait, in seconds."""

    max_connections: int = 512
    head_timeout_s: float = 20.0
    """Limit from the first byte of a request, or from the connection's start, to the end of its head."""
    keep_alive_s: float = 75.0
    """Longer than clients keep idle connections (httpx: 5 s), so that none is closed during a request."""
    write_timeout_s: float = 60.0
    """Limit for a client to resume reading after its answer has filled the buffers."""


@dataclass
class SharedByConnections:
    """State that the connections of one server share. Used on its event loop only."""

    limits: ConnectionLimits
    # asyncio copies into it and `buffer_updated` copies out of it before other code runs.
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(_LARGE_READ)))
    refused: set[Connection] = field(default_factory=set)
    """Connections beyond the limit that are being closed."""
    _logged: dict[bytes, float] = field(default_factory=dict)
    """Time at which each kind of refusal was logged last."""

    def log_refusal(self, answer: bytes) -> None:
        """Log an answer of `_refusal`, each kind once a second: any client can cause them by the thousand."""
        now = time.monotonic()
        if now - self._logged.get(answer, -_LOG_EVERY_S) < _LOG_EVERY_S:
            return
        self._logged[answer] = now
        head, _, body = answer.partition(b"\r\n\r\n")
        status, problem = int(head.split()[1]), json.loads(body)["error"]["message"]
        _logger.warning("%d: %s", status, problem, extra={"fields": {"status": status, "problem": problem}})


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's h11 protocol with deadlines and a connection limit.

    Buffered, because h11 parses all received bytes in one go: 256 KiB of one-byte chunks would block the loop for half
    a second, 4 KiB block it for 10 ms.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        shared: SharedByConnections,
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Http11(h11.SERVER)
        self._shared = shared
        self._limits = shared.limits
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self.timeout_keep_alive = shared.limits.keep_alive_s  # type: ignore[assignment]
        self.idle_since_s = self.loop.time()
        self._arriving: RequestTimes | None = None
        """Stopwatch of the request whose head is not complete yet."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    # Called by asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            # The longest idle connection is closed for the new one, so that connections without requests cannot block
            # /health.
            others: set[Any] = self.connections - {self}
            idle = [connection for connection in others if connection.is_idle]
            if not idle:
                self._refuse()
                return
            oldest = min(idle, key=lambda connection: connection.idle_since_s)
            self.connections.discard(oldest)
            oldest.transport.abort()
        self._deadline = self.loop.call_later(self._limits.head_timeout_s, self._time_out)

    def get_buffer(self, sizehint: int) -> memoryview:
        body = self.conn.their_state is h11.SEND_BODY and self.headers is not None
        in_one_piece = body and not any(name == b"transfer-encoding" for name, _ in self.headers)
        return self._shared.buffer if in_one_piece else self._shared.buffer[:_SMALL_READ]

    def buffer_updated(self, nbytes: int) -> None:
        if self not in self._shared.refused:
            self.data_received(bytes(self._shared.buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        if self._arriving is None and self.conn.their_state in (h11.IDLE, h11.DONE):
            waited_s = kernel_wait_s(self.transport.get_extra_info("socket"))
            self._arriving = RequestTimes.begin(waited_s)
        super().data_received(data)
        self._set_timers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._write_deadline):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        self._shared.refused.discard(self)
        super().connection_lost(exc)

    # Called by uvicorn

    def handle_events(self) -> None:
        previous = self.scope
        super().handle_events()
        if self.scope is not previous:
            # The application's task has not begun yet. A pipelined head that came with the body before it has no stamp.
            begin_times(cast(dict[str, Any], self.scope), self._arriving or RequestTimes.begin())
            self._arriving = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            # Closing waits for the client to have read everything.
            self._abort_later()
        elif self.is_idle:
            self.idle_since_s = self.loop.time()
            self._set_timers()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def send_400_response(self, msg: str) -> None:
        message = "invalid HTTP/1.1 request (a bad request line or header, or a head above 16 KiB)"
        self._close(_refusal(HTTPStatus.BAD_REQUEST, message))

    # Deadlines

    def _set_timers(self) -> None:
        """Run only the timer for the connection's current state."""
        if self.transport.is_closing():
            return
        begun = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
        if self.is_idle and begun:
            # Not renewed by further bytes: neither a head nor the unread rest of a body may drip.
            self._unset_keepalive_if_required()
            if self._deadline is None:
                self._deadline = self.loop.call_later(self._limits.head_timeout_s, self._time_out)
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self.is_idle and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self._limits.keep_alive_s, self.timeout_keep_alive_handler
            )

    def _time_out(self) -> None:
        begun = self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]
        message = f"the request's head did not arrive within {self._limits.head_timeout_s:g} s"
        self._close(_refusal(HTTPStatus.REQUEST_TIMEOUT, message) if begun else b"")

    def _close(self, answer: bytes) -> None:
        if answer:
            self._shared.log_refusal(answer)
        self.transport.write(answer)
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(self._limits.write_timeout_s, self._reset)

    def _reset(self) -> None:
        """Drop all unread data, also in the kernel, which would keep megabytes of it for a waiting client."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None and connection.fileno() >= 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    # Connection limit

    def _refuse(self) -> None:
        self.connections.discard(self)
        self._shared.refused.add(self)
        if len(self._shared.refused) > _MAX_REFUSED:
            self.transport.abort()
            return
        message = (
            f"all {self._limits.max_connections} connections of this server are in use; try again later "
            "(--max-connections)"
        )
        refusal = _refusal(HTTPStatus.SERVICE_UNAVAILABLE, message)
        self._shared.log_refusal(refusal)
        self.transport.write(refusal)
        # Closing at once would reset the connection while the request is in flight, and lose the answer.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.loop.call_later(_REFUSAL_S, self.transport.abort)


def _refusal(status: HTTPStatus, message: str) -> bytes:
    """A complete answer in OpenAI's error format, for a connection that has not reached the application."""
    is_busy = status == HTTPStatus.SERVICE_UNAVAILABLE
    error = {
        "message": message,
        "type": "server_error" if is_busy else "invalid_request_error",
        "param": None,
        "code": "too_many_connections" if is_busy else None,
    }
    body = json.dumps({"error": error}).encode()
    head = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(["retry-after: 1"] if is_busy else []),
    ]
    return "\r\n".join([*head, "", ""]).encode() + body
