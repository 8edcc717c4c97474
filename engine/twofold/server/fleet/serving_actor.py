"""An HTTP server inside a Ray actor, on the actor's own event loop."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl

from starlette.types import ASGIApp

from twofold.api.config import ServerConfig
from twofold.server.http.connections import ConnectionLimits
from twofold.server.listening import HttpServer, connection_bound


class ServingActor:
    """Base of Ray Serve's callables whose requests do not pass through Ray."""

    def start(
        self, app: ASGIApp, listener: socket.socket, config: ServerConfig, tls: ssl.SSLContext | None = None
    ) -> None:
        """Serve `app`. Needs a running event loop."""
        limits = ConnectionLimits(max_connections=connection_bound(config))
        self._server = HttpServer(app, limits, tls, flush_timeout_s=math.ceil(config.drain_timeout_s))
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))

    def check_health(self) -> None:
        """Called by Ray, which replaces the actor if this raises."""
        if self._serving.done():
            raise RuntimeError("the HTTP server has ended")

    async def drain(self) -> None:
        """Refuse new connections and wait until running requests have been answered."""
        self._server.should_exit = True
        await self._serving
