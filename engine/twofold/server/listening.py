"""The listening socket, and uvicorn's server on it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import resource
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from twofold.api.config import ServerConfig
from twofold.api.errors import ConfigError
from twofold.api.regular_file import open_regular
from twofold.server.http.connections import Connection, ConnectionLimits, SharedByConnections

_logger = logging.getLogger("twofold.server")

_FLUSH_TIMEOUT_S: Final = 5
"""Seconds after the drain for finished answers to reach their clients."""
_LOG_EVERY_S: Final = 1.0
_MOST_BY_DEFAULT: Final = 4096


def bind(config: ServerConfig, *, is_shared: bool = False) -> socket.socket:
    """A listening socket on the configured address.

    Args:
        is_shared: other processes of this user may listen there too; the kernel spreads connections among them.

    Raises:
        ConfigError: the port is in use, needs privileges or the host is none of this machine's.
    """
    address = f"{config.host}:{config.port}"
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # With the protocol named, not 0: asyncio sets TCP_NODELAY only on sockets whose protocol is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
        listener.bind((config.host, config.port))
        # Only listening reserves the port for certain; with SO_REUSEADDR two processes may both bind it.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(_why_not_bound(error, address)) from None
    listener.setblocking(False)
    return listener


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """The server's URL, without a path."""
    scheme = "https" if config.ssl_certfile else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def connection_bound(config: ServerConfig) -> int:
    """Most open connections: --max-connections, else what the limit of open files allows.

    Raises:
        ConfigError: --max-connections exceeds the limit of open files.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return config.max_connections or _MOST_BY_DEFAULT
    # An eighth, 96 at least, stays for weights, databases, pipes and devices.
    room = max(16, soft - max(96, soft // 8))
    if config.max_connections is None:
        return min(room, _MOST_BY_DEFAULT)
    if config.max_connections > room:
        raise ConfigError(
            f"--max-connections was given {config.max_connections}; the limit of {soft} open files leaves {room}; "
            "raise it (ulimit -n) or ask for fewer"
        )
    return config.max_connections


def certificate_of(config: ServerConfig) -> ssl.SSLContext | None:
    """TLS with the configured certificate; None for plain HTTP.

    Raises:
        ConfigError: a file is unreadable or not PEM, the key is encrypted or not the certificate's.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = f"--ssl-certfile {config.ssl_certfile} --ssl-keyfile {config.ssl_keyfile}"
    try:
        for file in filter(None, (config.ssl_certfile, config.ssl_keyfile)):
            open_regular(Path(file)).close()
        # The empty password keeps OpenSSL from asking on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot use {files}: {reason}; give a PEM certificate chain and its unencrypted private key"
        ) from None
    return context


class HttpServer(uvicorn.Server):
    """uvicorn over one bound socket, without its signal handling, which would end the process by the signal instead of
    with exit code 0. `should_exit = True` ends `serve`."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        certificate: ssl.SSLContext | None = None,
        *,
        flush_timeout_s: int = _FLUSH_TIMEOUT_S,
    ) -> None:
        """flush_timeout_s: how long running requests may take after `should_exit` was set."""
        connection: Any = functools.partial(Connection, shared=SharedByConnections(limits))
        super().__init__(
            uvicorn.Config(
                app,
                # uvicorn's warnings are one line per malformed request, which any client can send by the thousand.
                log_level="error",
                # Its own configuration would close the handlers that there are.
                log_config=None,
                access_log=False,
                lifespan="off",
                http=connection,
                # Another loop, which some other package may bring, has other transports.
                loop="asyncio",
                ws="none",
                timeout_graceful_shutdown=flush_timeout_s,
                server_header=False,
                # A forwarded address can be forged; /internal trusts only the real one.
                proxy_headers=False,
                ssl_context_factory=None if certificate is None else lambda config, default: certificate,
            )
        )
        self._logged_s = -_LOG_EVERY_S

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._handle_loop_error)
        await super().startup(sockets)

    def _handle_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Without a free file descriptor, asyncio reports an error for up to 2,048 tries to accept and tries again a
        second later. Log one of them, and close the idle connections."""
        error = context.get("exception")
        if self.should_exit and "_start_serving" in context["message"]:
            return  # one of those second tries, on a listener that has been closed meanwhile
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
            return
        connections: set[Any] = self.server_state.connections
        if loop.time() - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = loop.time()
            _logger.warning(
                "cannot accept a connection in addition to the %d open ones: %s; raise the limit of open files "
                "(ulimit -n) or lower --max-connections",
                len(connections),
                error.strerror,
            )
        for connection in [each for each in connections if each.is_idle]:
            connections.discard(connection)
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _why_not_bound(error: OSError, address: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use by another program; stop it or choose another --port (0: any free one)"
    if error.errno == errno.EACCES:
        return f"this user may not listen on {address}; choose a --port from 1024 up"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"this machine has no address {address}; choose a --host it has, e.g. 127.0.0.1 or 0.0.0.0"
    return f"cannot listen on {address}: {error.strerror or error}; choose another --host or --port"
