"""Loads models when a request names them, and unloads the least recently used when another one needs their place.

One worker loads and unloads, one model at a time. A model that is to be unloaded takes no new requests: they wait until
it is loaded again. Its running requests finish first, so no token is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from twofold.api.errors import CapacityError, TwofoldError
from twofold.api.models_config import ModelsConfig
from twofold.server.bridge.models.served_model import LoadedModel, ModelSource, ServedModel
from twofold.server.http.errors import unavailable

_log = logging.getLogger("twofold.server")
T = TypeVar("T")

_MOST_BY_DEFAULT: Final = 4
_MOST_WAITING: Final = 256
"""Most requests that wait for one model to be loaded."""
_LONGEST_UNKNOWN: Final = 2**20
"""Longest context assumed before any model's files were read."""
_RETRY_AFTER_S: Final = 5
_SLOW_LOAD_S: Final = 10.0
"""A load that takes longer is reported in the log while it goes on."""


@dataclass
class _Place:
    """State of one model in the manager."""

    source: ModelSource
    keep_alive_s: float
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    """Requests that wait until it is loaded. Once it is loaded, each holds it."""
    holds: int = 0
    """Requests that have not been submitted to its engine yet."""
    loaded: LoadedModel | None = None
    timer: asyncio.TimerHandle | None = None
    """Unloads it at the end of its keep-alive."""
    unload_reason: str = ""


class ModelManager:
    """Owns the engines of several models. Used on the event loop only."""

    def __init__(self, models: Sequence[ServedModel], limits: ModelsConfig) -> None:
        self._limits = limits
        self._most = _MOST_BY_DEFAULT if limits.models_max is None else limits.models_max or math.inf
        self._memory = math.inf if limits.models_memory_bytes is None else limits.models_memory_bytes
        self._places = {
            model: _Place(model.source, limits.keep_alive_s) for model in models if model.source is not None
        }
        for model in self._places:
            model.on_answer_closed = partial(self._answer_closed, model)
        self._jobs: deque[tuple[ServedModel, bool]] = deque()
        """Models to load (True) or to unload (False), in order."""
        self._worker: asyncio.Task[None] | None = None
        self._released = asyncio.Event()
        # One thread, so that loading never competes with loading.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load-model")

    @property
    def is_busy(self) -> bool:
        """Whether a model is being loaded or unloaded."""
        return bool(self._jobs) or self._worker is not None

    @property
    def max_context(self) -> int:
        """Longest context of any model whose files were read."""
        known = [model.description.max_context for model in self._places if model.description is not None]
        return max(known, default=_LONGEST_UNKNOWN) if len(known) == len(self._places) else _LONGEST_UNKNOWN

    def expires_s(self, model: ServedModel) -> float:
        """Unix time at which the loaded model is unloaded if no request comes; inf: never."""
        return model.last_used_s + self._places[model].keep_alive_s

    def num_bytes(self, model: ServedModel) -> int:
        """Memory of the loaded model."""
        loaded = self._places[model].loaded
        return 0 if loaded is None else loaded.num_bytes

    @contextlib.asynccontextmanager
    async def holding(self, model: ServedModel, keep_alive_s: float | None = None) -> AsyncIterator[None]:
        """Inside the block the model is loaded and stays so. Waits while it loads.

        Raises:
            CapacityError: too many requests wait for it.
            ApiError: 503 if it cannot be loaded.
        """
        place = self._places[model]
        if model.state == "loaded":
            place.holds += 1
        else:
            await self._wait_for(model, place)
        model.last_used_s = time.time()
        place.keep_alive_s = self._limits.keep_alive_s if keep_alive_s is None else keep_alive_s
        try:
            yield
        finally:
            self._release(model, place)

    def unload(self, model: ServedModel, why: str = "a client asked for it") -> None:
        """Unload it once its running requests have finished; new ones load it again. why: for the log."""
        if model.state == "loaded" and (model, False) not in self._jobs:
            self._places[model].unload_reason = why
            self._add_job(model, load=False)

    def load(self, model: ServedModel) -> None:
        """Load it, if it is not loaded, whether or not a request waits. A load under way serves this call too."""
        if model.state not in ("loaded", "loading") and (model, True) not in self._jobs:
            self._add_job(model, load=True)

    async def describe_all(self) -> None:
        """Read the headers of all models, one after the other; the reason is kept for a model that has none."""
        for model, place in self._places.items():
            try:
                found = await self._on_thread(place.source.describe)
            except (TwofoldError, OSError) as error:
                model.state, model.problem = (
                    ("failed", str(error)) if model.state == "unloaded" else (model.state, "")
                )
            else:
                model.description = model.description or found

    def begin_drain(self) -> None:
        """Refuse the requests that wait for a model."""
        for place in self._places.values():
            self._notify(place, unavailable("the server is shutting down", "server_draining", _RETRY_AFTER_S))
            if place.timer is not None:
                place.timer.cancel()
        self._jobs.clear()

    def close(self) -> None:
        """Close all engines. Blocks."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for place in self._places.values():
            if place.loaded is not None:
                place.loaded.close()

    # ---- requests ----

    async def _wait_for(self, model: ServedModel, place: _Place) -> None:
        """Wait until the model is loaded, then hold it."""
        if len(place.waiters) >= _MOST_WAITING:
            raise CapacityError(f"{_MOST_WAITING} requests wait for {model.name!r} to be loaded; try later")
        waiter = asyncio.get_running_loop().create_future()
        place.waiters.append(waiter)
        self.load(model)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in place.waiters:
                place.waiters.remove(waiter)
            elif not waiter.cancelled() and waiter.exception() is None:
                self._release(model, place)  # told just now
            raise

    def _release(self, model: ServedModel, place: _Place) -> None:
        place.holds -= 1
        self._released.set()
        self._set_timer(model, place)

    def _notify(self, place: _Place, error: Exception | None) -> None:
        waiters, place.waiters = place.waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                place.holds += 1
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    # ---- keep-alive ----

    def _set_timer(self, model: ServedModel, place: _Place) -> None:
        if place.timer is not None:
            place.timer.cancel()
            place.timer = None
        if place.keep_alive_s < math.inf:
            loop = asyncio.get_running_loop()
            place.timer = loop.call_later(place.keep_alive_s, self._expired, model, place)

    def _expired(self, model: ServedModel, place: _Place) -> None:
        place.timer = None
        if not (place.holds or model.answers):
            self.unload(model, f"no request for {place.keep_alive_s:g} s")

    def _answer_closed(self, model: ServedModel) -> None:
        """Keep-alive counts from the end of the last answer."""
        model.last_used_s = time.time()
        self._set_timer(model, self._places[model])

    # ---- the worker ----

    def _add_job(self, model: ServedModel, *, load: bool) -> None:
        self._jobs.append((model, load))
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._jobs:
                model, load = self._jobs.popleft()
                if load and model.state != "loaded":
                    await self._load(model, self._places[model])
                elif not load and model.state == "loaded":
                    await self._unload(model, self._places[model])
        finally:
            self._worker = None

    async def _load(self, model: ServedModel, place: _Place) -> None:
        model.state = "loading"
        begin_s = time.monotonic()
        slow = asyncio.get_running_loop().call_later(_SLOW_LOAD_S, _log_slow_load, model, place)
        try:
            needed = await self._on_thread(place.source.required_bytes)
            await self._make_room(model, needed)
            loaded = await self._on_thread(place.source.load)
        except Exception as error:
            why = str(error) or type(error).__name__
            if not isinstance(error, TwofoldError):
                _log.exception("loading %s failed", model.name)
            model.state, model.problem = "failed", " ".join(why.split())
            _log_event(logging.WARNING, "load failed", model, f"cannot load {model.name}: {model.problem}")
            message = f"the model {model.name!r} cannot be loaded: {model.problem}"
            self._notify(place, unavailable(message, "model_load_failed", _RETRY_AFTER_S))
            return
        finally:
            slow.cancel()
        place.loaded = loaded
        _log_event(
            logging.INFO,
            "loaded",
            model,
            f"loaded {model.name} in {time.monotonic() - begin_s:.1f} s, {loaded.num_bytes / 2**30:.2f} GiB",
        )
        model.loaded(loaded.engine, loaded.sampling_defaults, loaded.sink)
        self._notify(place, None)
        if not place.holds:
            self._set_timer(model, place)

    async def _make_room(self, incoming: ServedModel, needed: int) -> None:
        """Unload models, idle ones first, then the least recently used, until another one of `needed` bytes fits."""
        while True:
            others = [model for model, place in self._places.items() if place.loaded is not None]
            used = sum(map(self.num_bytes, others))
            if not others or (len(others) < self._most and used + needed <= self._memory):
                return
            victim = min(others, key=lambda model: (self._is_in_use(model), model.last_used_s))
            self._places[victim].unload_reason = f"evicted for {incoming.name}"
            await self._unload(victim, self._places[victim])

    def _is_in_use(self, model: ServedModel) -> bool:
        return bool(self._places[model].holds or model.answers)

    async def _unload(self, model: ServedModel, place: _Place) -> None:
        # From here on this call closes the engine, and no other.
        loaded, place.loaded = place.loaded, None
        assert loaded is not None, "a model is unloaded once"
        model.state = "unloading"
        while place.holds:
            self._released.clear()
            await self._released.wait()

        def finish() -> None:
            # Running requests have no time limit, as without a second model.
            loaded.engine.drain(threading.TIMEOUT_MAX)
            loaded.close()

        await self._on_thread(finish)
        model.unloaded()
        _log_event(logging.INFO, "unloaded", model, f"unloaded {model.name}: {place.unload_reason}")
        if place.timer is not None:
            place.timer.cancel()
            place.timer = None

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _log_slow_load(model: ServedModel, place: _Place) -> None:
    waiting = len(place.waiters)
    requests = "1 request waits" if waiting == 1 else f"{waiting} requests wait"
    text = f"still loading {model.name} after {_SLOW_LOAD_S:.0f} s; {requests} for it"
    _log_event(logging.INFO, "slow load", model, text)


def _log_event(level: int, event: str, model: ServedModel, text: str) -> None:
    _log.log(level, "%s", text, extra={"fields": {"event": event, "model": model.name}})
