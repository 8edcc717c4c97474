"""Runs the application as a process: a socket, a model that loads meanwhile, signals, a drain.

The socket is bound first, so a port in use is known before any weight is read; /health answers 503 while the
model loads. The first SIGTERM or SIGINT stops new requests, lets the running ones finish and ends with code
0; the second ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

import uvicorn

from twofold.config import ServerConfig
from twofold.errors import ConfigError
from twofold.server.app import app_of
from twofold.server.protocol import ServingEngine
from twofold.server.state import ServerState
from twofold.telemetry.sink import TelemetrySink
from twofold.types import SamplingParams

_FLUSH_TIMEOUT_S: Final = 5
"""Seconds that answers already computed get to reach their clients after the drain."""


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket on the configured address.

    Raises:
        ConfigError: the port is in use, needs privileges or the host is none of this machine's.
    """
    address = f"{config.host}:{config.port}"
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        # Only listening takes the port for certain; two processes may both bind it with SO_REUSEADDR.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(_why_not_bound(error, address)) from None
    listener.setblocking(False)
    return listener


def _why_not_bound(error: OSError, address: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use by another program; stop it or choose another --port (0: any free one)"
    if error.errno == errno.EACCES:
        return f"this user may not listen on {address}; choose a --port from 1024 up"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"this machine has no address {address}; choose a --host it has, e.g. 127.0.0.1 or 0.0.0.0"
    return f"cannot listen on {address}: {error.strerror or error}; choose another --host or --port"


class ServerProcess:
    """One life of the server. `run` returns after a drain and raises what loading raised."""

    def __init__(
        self,
        config: ServerConfig,
        sink: TelemetrySink | None,
        load: Callable[[], tuple[ServingEngine, SamplingParams | None]],
        *,
        on_ready: Callable[[ServingEngine], None] = lambda engine: None,
        on_drain: Callable[[int], None] = lambda num_running: None,
    ) -> None:
        """
        Args:
            load: loads and starts the engine; called on a thread of its own.
            on_ready: told when requests are taken, on the event loop.
            on_drain: told how many requests are still running when the first signal arrives.
        """
        self.state = ServerState(config, sink)
        self._config = config
        self._load = load
        self._on_ready = on_ready
        self._on_drain = on_drain
        self._failure: BaseException | None = None
        self._loader = threading.Thread(target=self._run_load, name="load", daemon=True)
        self._num_signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = _Server(
            uvicorn.Config(
                app_of(self.state),
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                # Longer than clients keep idle connections (httpx: 5 s), so that none is closed under a
                # request.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_FLUSH_TIMEOUT_S,
                server_header=False,
                # A forwarded address could be made up; /internal trusts the real one only.
                proxy_headers=False,
            )
        )

    def run(self, listener: socket.socket) -> None:
        """Serve on `listener` until a signal has been obeyed."""
        with _handling_signals(self._on_signal):
            asyncio.run(self._serve(listener))
            if self._failure is not None:
                raise self._failure

    @property
    def is_still_loading(self) -> bool:
        """Whether a signal ended the server before its model was there; the thread cannot be stopped."""
        return self._loader.is_alive()

    async def _serve(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._loader.start()
        await self._server.serve(sockets=[listener])
        self.state.workers.shutdown(wait=False, cancel_futures=True)

    def _run_load(self) -> None:
        try:
            engine, sampling_defaults = self._load()
        except BaseException as error:
            self._post(self._failed, error)
        else:
            self._post(self._ready, engine, sampling_defaults)

    def _ready(self, engine: ServingEngine, sampling_defaults: SamplingParams | None) -> None:
        self.state.ready(engine, sampling_defaults)
        if self.state.phase == "ready":
            self._on_ready(engine)

    def _failed(self, error: BaseException) -> None:
        self._failure = error
        self._server.should_exit = True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            os._exit(128 + number)
        self._post(self._begin_drain)

    def _begin_drain(self) -> None:
        self.state.phase = "draining"
        assert self._loop is not None
        task = self._loop.create_task(self._drain())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self) -> None:
        engine = self.state.loaded_engine
        if engine is not None:
            self._on_drain(len(self.state.answers))
            if not await asyncio.to_thread(engine.drain, self._config.drain_timeout_s):
                for answer in list(self.state.answers):
                    answer.cancel()
        self._server.should_exit = True

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        """Run `function` on the event loop, from any thread or signal handler."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process by the signal instead of by code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
