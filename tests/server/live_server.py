"""Serves an application on a real socket of 127.0.0.1, on a thread of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import httpx
import uvicorn
from starlette.types import ASGIApp

HTTP = httpx.Client(timeout=30, trust_env=False)
"""For plain requests; one for all tests, because making a client reads certificates for tens of milliseconds."""


@contextlib.contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """The base URL of `app`, e.g. "http://127.0.0.1:40123"; it stops at the end."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="error", lifespan="off", ws="none", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    # The socket listens already: a client that comes before uvicorn does waits in its backlog.
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
