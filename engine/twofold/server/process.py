"""Runs the application as a process: socket, model loading in the background, signals, drain.

The socket is bound first, so that a port in use is reported before any weight is read; /health answers 503 while the
model loads. The first SIGTERM or SIGINT stops new requests, lets the running ones finish and ends with code 0; the
second ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, Final

from twofold.api.types import SamplingParams
from twofold.server.app import app_of
from twofold.server.bridge.models.protocol import ServingEngine
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.http.connections import ConnectionLimits
from twofold.server.listening import HttpServer, certificate_of, connection_bound

_logger = logging.getLogger("twofold.server")


class ServerProcess:
    """One run of the server. `run` returns after a drain and raises any error of loading."""

    def __init__(
        self,
        state: ServerState,
        load: Callable[[], tuple[ServingEngine, SamplingParams | None]] | None,
        *,
        on_ready: Callable[[], None] = lambda: None,
        on_drain: Callable[[int], None] = lambda num_running: None,
    ) -> None:
        """
        Args:
            load: loads and starts the single model's engine; called on its own thread. None: the models are loaded on
                demand.
            on_ready: called when requests are accepted.
            on_drain: called at the first signal with the number of running requests.

        Both callbacks run on their own thread, one after the other: they usually print, and a print may fail (a closed
        pipe) or never return (a pipe without a reader). Neither stops the server or keeps it from ending.

        Raises:
            ConfigError: --max-connections exceeds the limit of open files, or the certificate cannot be used.
        """
        self.state = state
        self._config = config = state.config
        self._load = load
        self._on_ready = on_ready
        self._on_drain = on_drain
        self._failure: BaseException | None = None
        self._loader = threading.Thread(target=self._run_load, name="load", daemon=True)
        self._notifier = _Notifier()
        self._num_signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        limits = ConnectionLimits(max_connections=connection_bound(config))
        self._server = HttpServer(app_of(self.state), limits, certificate_of(config))

    def run(self, listener: socket.socket) -> None:
        """Serve on `listener` until a signal has been handled."""
        with _handling_signals(self._on_signal):
            asyncio.run(self._serve(listener))
            self._notifier.close()
            if self._failure is not None:
                raise self._failure

    @property
    def is_still_loading(self) -> bool:
        """Whether a signal ended the server while a model was loading; the thread cannot be stopped."""
        return self._loader.is_alive() or (self.state.manager is not None and self.state.manager.is_busy)

    async def _serve(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._loader.start()
        if self.state.manager is not None:
            self._start(self.state.manager.describe_all())
        await self._server.serve(sockets=[listener])
        self.state.close()

    def _run_load(self) -> None:
        begin_s = time.monotonic()
        try:
            loaded = None if self._load is None else self._load()
            # Started before the first large body, which would otherwise wait for it.
            self.state.body_worker.start()
            # A full collection of what loading leaves takes 300 ms, which every stream would wait for. It never becomes
            # garbage while the process serves, and is not looked at again.
            gc.collect()
            gc.freeze()
        except BaseException as error:
            self._post(self._failed, error)
        else:
            self._post(self._ready, loaded, time.monotonic() - begin_s)

    def _ready(self, loaded: tuple[ServingEngine, SamplingParams | None] | None, seconds: float) -> None:
        if loaded is not None:
            self.state.ready(*loaded)
            fields = {"event": "loaded", "model": self.state.default.name, "seconds": round(seconds, 1)}
            _logger.info("loaded %s in %.1f s", fields["model"], seconds, extra={"fields": fields})
        if self.state.phase == "ready":
            self._notifier.notify(self._on_ready)

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
        if self.state.manager is not None:
            self.state.manager.begin_drain()
        self._start(self._drain())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self) -> None:
        models = self.state.loaded_models
        if models:
            self._notifier.notify(self._on_drain, sum(len(model.answers) for model in models))
            await asyncio.gather(*map(self._drain_model, models))
        self._server.should_exit = True

    async def _drain_model(self, model: ServedModel) -> None:
        engine = model.engine_while_draining
        if not await asyncio.to_thread(engine.drain, self._config.drain_timeout_s):
            for answer in list(model.answers):
                answer.cancel()

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        """Run `function` on the event loop, from any thread or signal handler."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


class _Notifier:
    """Runs notification callbacks in order on a thread, without waiting for them."""

    _CLOSE_TIMEOUT_S: Final = 1.0

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
        self._thread.start()

    def notify(self, function: Callable[..., None], *arguments: object) -> None:
        self._calls.put(lambda: function(*arguments))

    def close(self) -> None:
        """Finish pending callbacks, waiting a second at most."""
        self._calls.put(None)
        self._thread.join(self._CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:
                _logger.warning("a notification of the server failed: %s: %s", type(error).__name__, error)


@contextlib.contextmanager
def _handling_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
