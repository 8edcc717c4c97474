"""LoRA adapters of a serving engine: which are known, which lie in memory, and which requests use them."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from twofold.adapters.adapter import Adapter
from twofold.adapters.reading import read_adapter
from twofold.adapters.weighted_sum import weighted_sum
from twofold.api.adapter_config import AdapterConfig
from twofold.api.errors import CapacityError, ConfigError
from twofold.api.types import LoadedAdapter
from twofold.engine.inbox import Inbox
from twofold.engine.scheduler import Scheduler
from twofold.step.adapters import AdaptedModel

MAX_NAME: Final = 256
Parts = tuple[tuple[str, float], ...]
"""Names of adapters, each with the scale of its change."""


def numbers_in_use(inbox: Inbox, scheduler: Scheduler) -> set[int]:
    """Numbers of the adapters of live requests."""
    with inbox.changed:
        # Waiting ones twice: a preempted sequence goes back there.
        live = (*inbox.new(), *scheduler.waiting, *scheduler.running, *scheduler.waiting)
        return {each.request.adapter.number for each in live if each.request.adapter is not None}


@dataclass
class KnownAdapter:
    """An adapter that requests may name, or a weighted sum of such adapters."""

    name: str
    path: Path
    number: int = -1
    """Its id in llama.cpp's API; -1: a sum."""
    scale: float = 0.0
    """Scale of its change in requests that name no adapter."""
    parts: Parts = ()
    """Adapters that it is the sum of; empty: none."""
    parent: str = ""
    """Name of the base model that its files give; empty before they are read, or if they give none."""
    loaded: LoadedAdapter | None = None
    """None: it is read when a request names it."""
    used: int = field(default=0, compare=False)
    """Order of its last use."""


class Adapters:
    """Adapters of one engine by name. Methods may be called from any thread but the engine's; some read files.

    At most `max_cpu_loras` adapters lie in memory: of those that no request uses, the least recently used leaves first.
    """

    def __init__(
        self,
        config: AdapterConfig,
        model: AdaptedModel | None,
        between_steps: Callable[[Callable[[], None]], None],
        numbers_in_use: Callable[[], set[int]],
    ) -> None:
        """
        Args:
            model: None: the runner computes no adapters.
            between_steps: runs work before the engine's next step; see `LiveControl.between_steps`.
            numbers_in_use: numbers of the adapters of live requests.
        """
        self._config, self._model = config, model
        self._between_steps, self._numbers_in_use = between_steps, numbers_in_use
        self._reading = threading.Lock()
        """Held while an adapter is read and put into native memory."""
        self._lock = threading.Lock()
        """Guards the fields below, for moments."""
        self._known: dict[str, KnownAdapter] = {}
        self._sums: dict[Parts, KnownAdapter] = {}
        """Weighted sums in memory."""
        self._held: Counter[int] = Counter()
        """Numbers of adapters in memory that requests are about to use."""
        self._retired: dict[int, LoadedAdapter] = {}
        """Adapters in memory, by number, that new requests no longer get."""
        self._uses = itertools.count(1)
        self._ids = itertools.count()

    def known(self) -> list[KnownAdapter]:
        """All adapters, in the order of their loading."""
        with self._lock:
            return list(self._known.values())

    @property
    def scales(self) -> Parts:
        """Adapters that change requests that name none, with their scales."""
        return tuple((each.name, each.scale) for each in self.known() if each.scale)

    def set_scales(self, scales: Mapping[str, float]) -> None:
        """Set `scales`; adapters that are not given get 0. Raises KeyError for an unknown name."""
        with self._lock:
            for name in scales:
                _ = self._known[name]
            for known in self._known.values():
                known.scale = scales.get(known.name, 0.0)

    def load(self, name: str, path: Path, scale: float = 0.0) -> LoadedAdapter:
        """Make an adapter known and load it. A known name gets the new files; its running requests finish with the old.

        scale: of its change in requests that name no adapter; a known name keeps its own.

        Raises:
            ConfigError: the engine computes no adapters, or the name cannot be used.
            ModelLoadError: the files cannot be used.
            CapacityError: there is no room. Nothing has changed after any of them.
        """
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise ConfigError(
                f"an adapter's name was given as {name!r}; it takes 1 to {MAX_NAME} printable characters"
            )
        with self._reading:
            fresh = KnownAdapter(name, path, scale=scale)
            loaded = self._read(fresh)
            with self._lock:
                old = self._known.get(name)
                if old is None:
                    fresh.number = next(self._ids)
                else:
                    fresh.number, fresh.scale = old.number, old.scale
                    self._retire(old)
                self._known[name] = fresh
            self._free_retired()
        return loaded

    def unload(self, name: str) -> None:
        """Forget an adapter; its running requests finish. Raises KeyError for an unknown name."""
        with self._reading:
            with self._lock:
                self._retire(self._known.pop(name))
            self._free_retired()

    def hold(self, parts: Parts) -> LoadedAdapter:
        """The weighted sum of adapters for a new request, read if it is not in memory, where it stays until `release`.

        Raises as `load`, and KeyError for an unknown name.
        """
        with self._reading:
            if (found := self.hold_loaded(parts)) is not None:
                return found
            with self._lock:
                known = self._find(parts)
                if known is None:
                    name = "+".join(f"{name}*{scale:g}" for name, scale in parts)
                    known = KnownAdapter(name, self._known[parts[0][0]].path, parts=parts)
            loaded = self._read(known)
            with self._lock:
                if known.parts:
                    self._sums[parts] = known
                # Nothing leaves memory while `_reading` is held.
                self._held[loaded.number] += 1
            return loaded

    def hold_loaded(self, parts: Parts) -> LoadedAdapter | None:
        """As `hold`, without reading files or waiting; None if it is not in memory."""
        with self._lock:
            known = self._find(parts)
            if known is None or known.loaded is None:
                return None
            known.used = next(self._uses)
            self._held[known.loaded.number] += 1
            return known.loaded

    def release(self, adapter: LoadedAdapter) -> None:
        """End of a `hold`: the requests are among the live ones, or there are none."""
        with self._lock:
            self._held[adapter.number] -= 1
            self._held += Counter()  # without zeros

    @contextmanager
    def submitting(self, adapter: LoadedAdapter) -> Iterator[None]:
        """Keep the adapter in memory until its request is among the live ones. Raises CapacityError if it has left."""
        with self._lock:
            if self._in_native().get(adapter.number) is not adapter:
                raise CapacityError(f"adapter {adapter.name} has just left memory; try again")
            yield

    def _find(self, parts: Parts) -> KnownAdapter | None:
        """The adapter, or the sum if it is in memory. KeyError for an unknown name. Call with `_lock`."""
        known = [self._known[name] for name, _ in parts]
        return known[0] if len(parts) == 1 and parts[0][1] == 1 else self._sums.get(parts)

    def _in_memory(self) -> list[KnownAdapter]:
        """All adapters that new requests may get without reading. Call with `_lock`."""
        return [each for each in (*self._known.values(), *self._sums.values()) if each.loaded]

    def _in_native(self) -> dict[int, LoadedAdapter]:
        """All adapters in native memory by number."""
        return {each.loaded.number: each.loaded for each in self._in_memory() if each.loaded} | self._retired

    def _retire(self, known: KnownAdapter) -> None:
        """Give the adapter to no further request, nor any sum with it."""
        self._evict(known)
        for each in list(self._sums.values()):
            if known.name in dict(each.parts):
                self._evict(each)

    def _evict(self, known: KnownAdapter) -> None:
        """Let it leave memory once no request uses it."""
        if known.loaded is not None:
            self._retired[known.loaded.number] = known.loaded
            known.loaded = None
        self._sums.pop(known.parts, None)

    def _read(self, known: KnownAdapter) -> LoadedAdapter:
        model = self._model
        if model is None:
            raise ConfigError(
                "the devices have no memory for adapters: start with --lora-modules or --lora-dir, or with "
                "--accelerator none"
            )
        adapter = self._from_files(known, model)
        prepared = model.prepare(adapter)
        self._make_room(lambda: model.lacks_room(prepared))
        with self._lock:
            number = next(each for each in itertools.count() if each not in self._in_native())
        self._between_steps(lambda: model.put(number, prepared))
        with self._lock:
            known.parent, known.used = adapter.base_name, next(self._uses)
            known.loaded = LoadedAdapter(
                known.name,
                number,
                adapter.digest,
                path=str(known.path),
                rank=adapter.max_rank,
                num_bytes=prepared.num_bytes,
            )
        return known.loaded

    def _from_files(self, known: KnownAdapter, model: AdaptedModel) -> Adapter:
        if known.parts:
            with self._lock:
                parts = [(self._known[name], scale) for name, scale in known.parts]
            return weighted_sum([(self._from_files(part, model), scale) for part, scale in parts], known.name)
        return read_adapter(known.path, model.shapes, name=known.name, max_rank=self._config.max_lora_rank)

    def _make_room(self, lacks_room: Callable[[], bool]) -> None:
        """Let idle adapters leave until one more fits. lacks_room: whether the model has too little memory for it."""
        self._free_retired()
        with self._lock:
            num_left = len(self._in_native()) - self._config.max_cpu_loras + 1
            idle = self._idle()
            if num_left > len(idle):
                raise CapacityError(
                    f"requests use all adapters that memory holds (--max-cpu-loras {self._config.max_cpu_loras}); "
                    "try later"
                )
            for known in idle[: max(num_left, 0)]:
                self._evict(known)
        self._free_retired()
        while lacks_room():
            with self._lock:
                if not (idle := self._idle()):
                    return
                self._evict(idle[0])
            self._free_retired()

    def _idle(self) -> list[KnownAdapter]:
        """Adapters in memory that no request uses, the least recently used first. Call with `_lock`."""
        in_use = self._numbers_in_use() | self._held.keys()
        idle = [each for each in self._in_memory() if each.loaded and each.loaded.number not in in_use]
        return sorted(idle, key=lambda each: each.used)

    def _free_retired(self) -> None:
        """Free the memory of retired adapters that no request uses any more."""
        with self._lock:
            done = self._retired.keys() - self._numbers_in_use() - self._held.keys()
            for number in done:
                del self._retired[number]
        model = self._model
        if model is None or not done:
            return

        def drop() -> None:
            for number in done:
                model.drop(number)

        self._between_steps(drop)
