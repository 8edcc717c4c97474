"""The listening socket, and uvicorn's server with an accept loop that cannot spin when file descriptors run out.

Without a free descriptor, asyncio's own loop retries up to the backlog's length and logs a traceback for each try:
2,048 of them a second. This loop closes the longest idle connection, logs once a second and waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Final

import uvicorn

from twofold.api.config import ServerConfig
from twofold.api.errors import ConfigError
from twofold.server.bridge.middleware import RequestFrame
from twofold.server.http.connections import SMALL_READ, Connection, ConnectionLimits, OpenConnections
from twofold.server.http.early_refusals import whole_request

_logger = logging.getLogger("twofold.server")

_FLUSH_TIMEOUT_S: Final = 5
"""Seconds after the drain for finished answers to reach their clients."""
_ACCEPTS_AT_ONCE: Final = 64
"""Connections accepted in a row before the loop handles received data."""
_ACCEPT_RETRY_S: Final = 0.05
_LOG_EVERY_S: Final = 1.0
_MOST_BY_DEFAULT: Final = 4096


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket on the configured address.

    Raises:
        ConfigError: the port is in use, needs privileges or the host is none of this machine's.
    """
    address = f"{config.host}:{config.port}"
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # With the protocol named, not 0: asyncio sets TCP_NODELAY only on sockets whose protocol is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        # Only listening reserves the port for certain; with SO_REUSEADDR two processes may both bind it.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(_why_not_bound(error, address)) from None
    listener.setblocking(False)
    return listener


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


class HttpServer(uvicorn.Server):
    """uvicorn over one bound socket, without its signal handling, which would end the process by the signal instead of
    with exit code 0. `should_exit = True` ends `serve`."""

    def __init__(self, app: RequestFrame, limits: ConnectionLimits) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                # uvicorn's warnings are one line per malformed request, which any client can send by the thousand.
                log_level="error",
                access_log=False,
                lifespan="off",
                http="h11",
                ws="none",
                timeout_graceful_shutdown=_FLUSH_TIMEOUT_S,
                server_header=False,
                # A forwarded address can be forged; /internal trusts only the real one.
                proxy_headers=False,
            )
        )
        self._limits = limits
        self._early_refusals = app.early_refusals

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        assert len(sockets) == 1
        await self.lifespan.startup()
        opened = OpenConnections(self._limits, self.server_state.connections, self._early_refusals)

        def connection() -> Connection:
            return Connection(self.config, self.server_state, self.lifespan.state, opened)

        self.servers = [_Acceptor(sockets[0], connection, opened)]  # type: ignore[list-item]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Acceptor:
    """Accepts from a listening socket on the running loop until closed."""

    def __init__(
        self, listener: socket.socket, connection: Callable[[], Connection], opened: OpenConnections
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._connection = connection
        self._opened = opened
        self._attaching: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._logged_s = -_LOG_EVERY_S
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Return at once: closing takes no time."""

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._pause(error)
                return
            accepted.setblocking(False)
            if self._refused(accepted):
                continue
            task = self._loop.create_task(self._attach(accepted))
            self._attaching.add(task)
            task.add_done_callback(self._attaching.discard)

    def _refused(self, accepted: socket.socket) -> bool:
        """Whether a request that arrived with its connection, and ends with it, was refused without a transport."""
        if not self._opened.early_refusals.is_full():
            return False
        try:
            data = accepted.recv(SMALL_READ, socket.MSG_PEEK)
            request = whole_request(data)
            if request is None or not request.closes:
                return False
            answer = self._opened.early_refusals.answer(request)
            if answer is None:
                return False
            accepted.recv(len(data))  # what is left unread would turn the closing into a reset
            accepted.send(answer)
        except OSError:
            return False
        accepted.close()
        return True

    async def _attach(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._connection, accepted)
        except OSError:
            # The client was gone before it was accepted.
            accepted.close()

    def _pause(self, error: OSError) -> None:
        """Pause accepting, which would fail again at once without descriptors or memory; close an idle connection."""
        num_open = len(self._opened.connections)
        self._opened.give_up_longest_idle()
        now_s = self._loop.time()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            advice = ""
            if error.errno in (errno.EMFILE, errno.ENFILE):
                advice = "; raise the limit of open files (ulimit -n) or lower --max-connections"
            _logger.warning(
                "cannot accept a connection beside the %d open ones: %s%s",
                num_open,
                error.strerror or error,
                advice,
            )
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(_ACCEPT_RETRY_S, self._resume)

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)


def _why_not_bound(error: OSError, address: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use by another program; stop it or choose another --port (0: any free one)"
    if error.errno == errno.EACCES:
        return f"this user may not listen on {address}; choose a --port from 1024 up"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"this machine has no address {address}; choose a --host it has, e.g. 127.0.0.1 or 0.0.0.0"
    return f"cannot listen on {address}: {error.strerror or error}; choose another --host or --port"
