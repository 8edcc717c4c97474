"""One HTTP request over a connection of its own, whose answer is stamped when the kernel hands it over.

With many streams on one event loop an answer waits until those before it have been parsed. A moment read then would
measure the client. So each piece gets its time in the callback of its socket, before anything is parsed.
"""

from __future__ import annotations

import asyncio
import ssl
import urllib.parse
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import h11

_MAX_HEAD_BYTES: Final = 1 << 16


class _Inbox(asyncio.Protocol):
    """Pieces that came over the connection, each with the loop's time; b"" at its end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pieces: deque[tuple[bytes, float]] = deque()
        self._arrived = asyncio.Event()
        self._error: Exception | None = None

    def data_received(self, data: bytes) -> None:
        self._pieces.append((data, self._loop.time()))
        self._arrived.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._error = exc
        self.data_received(b"")

    async def next(self) -> tuple[bytes, float]:
        """The next piece, b"" at the end of the connection. OSError if it broke."""
        while not self._pieces:
            self._arrived.clear()
            await self._arrived.wait()
        data, at_s = self._pieces.popleft()
        if not data and self._error is not None:
            raise self._error
        return data, at_s


@dataclass(frozen=True)
class StampedAnswer:
    """The head of an answer, and its body as it arrives."""

    status: int
    headers: Mapping[str, str]
    """By lower-case names."""
    pieces: AsyncIterator[tuple[bytes, float]]
    """Parts of the body and the loop's time at which each came."""


@asynccontextmanager
async def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    tls: ssl.SSLContext | None,
    on_sent: Callable[[], None],
) -> AsyncIterator[StampedAnswer]:
    """POST `body`. `on_sent` is called when the request was written to the kernel. The connection is closed at the end
    of the block, whatever of the answer was read.

    ConnectionError if there is no connection, if it breaks, or for an answer that is not HTTP/1.1.
    """
    parsed = urllib.parse.urlsplit(url)
    port = parsed.port or (443 if parsed.scheme == "https" else 80)
    loop = asyncio.get_running_loop()
    transport: asyncio.Transport | None = None
    try:
        transport, inbox = await loop.create_connection(
            lambda: _Inbox(loop), parsed.hostname or "", port, ssl=tls if parsed.scheme == "https" else None
        )
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        head = {**headers, "Host": parsed.netloc, "Connection": "close", "Content-Length": str(len(body))}
        target = urllib.parse.urlunsplit(("", "", parsed.path or "/", parsed.query, ""))
        request = h11.Request(method="POST", target=target, headers=list(head.items()))
        transport.write(b"".join(connection.send(each) or b"" for each in _sent(request, body)))
        on_sent()
        events = _events(connection, inbox)
        async for event, _ in events:
            if isinstance(event, h11.Response):
                names = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                yield StampedAnswer(event.status_code, names, _body(events))
                return
    except h11.ProtocolError as error:
        raise ConnectionError(str(error) or type(error).__name__) from error
    except OSError as error:
        raise ConnectionError(str(error) or type(error).__name__) from error
    finally:
        if transport is not None:
            transport.abort()


def _sent(request: h11.Request, body: bytes) -> tuple[h11.Request, h11.Data, h11.EndOfMessage]:
    return request, h11.Data(data=body), h11.EndOfMessage()


async def _events(connection: h11.Connection, inbox: _Inbox) -> AsyncIterator[tuple[h11.Event, float]]:
    """Events of the answer until its end, each with the time of the last piece that it needed."""
    at_s = 0.0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            data, at_s = await inbox.next()
            if not data and connection.their_state is h11.SEND_RESPONSE:
                raise ConnectionError("the server disconnected without sending a response")
            connection.receive_data(data)
            continue
        assert isinstance(event, h11.Event)
        yield event, at_s
        if isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            return


async def _body(events: AsyncIterator[tuple[h11.Event, float]]) -> AsyncIterator[tuple[bytes, float]]:
    async for event, at_s in events:
        if isinstance(event, h11.Data):
            yield bytes(event.data), at_s
