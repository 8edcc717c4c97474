"""Serves an application on a real socket of 127.0.0.1, on a thread of this process."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator

import httpx
from starlette.types import ASGIApp
from twofold.api.config import ServerConfig
from twofold.server.http.connections import ConnectionLimits
from twofold.server.listening import HttpServer, bind

from tests.conftest import thread_stacks

HTTP = httpx.Client(timeout=30, trust_env=False)
"""Client for plain requests, shared by all tests: making one reads certificates for tens of milliseconds."""

WAIT_S = 60


@contextlib.contextmanager
def serving(
    app: ASGIApp, limits: ConnectionLimits | None = None, certificate: ssl.SSLContext | None = None
) -> Iterator[str]:
    """The base URL of `app`, e.g. "http://127.0.0.1:40123"; it stops at the end."""
    listener = bind(ServerConfig(port=0))
    server = HttpServer(app, limits or ConnectionLimits(), certificate)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    # The socket listens already: a client that comes before the server does waits in its backlog.
    thread.start()
    try:
        yield f"http{'s' if certificate else ''}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"the server did not end:\n{thread_stacks()}"


def receive_until(connection: socket.socket, mark: bytes) -> bytes:
    """All bytes received up to the piece that completes `mark`, which must come before the server closes."""
    received = b""
    while mark not in received:
        piece = connection.recv(4096)
        assert piece, f"closed after {received!r}"
        received += piece
    return received


def connect(url: str) -> socket.socket:
    """A plain connection to the server at `url`."""
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)
