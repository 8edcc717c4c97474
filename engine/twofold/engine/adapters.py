"""LoRA adapters of a serving engine: which are known, which lie in memory, and which requests use them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from twofold.adapters.reading import read_adapter
from twofold.api.adapter_config import AdapterConfig
from twofold.api.errors import CapacityError, ConfigError
from twofold.api.types import LoadedAdapter
from twofold.engine.inbox import Inbox
from twofold.engine.scheduler import Scheduler
from twofold.step.adapters import ModelAdapters

MAX_NAME: Final = 256
_SUFFIXES: Final = (".safetensors", ".gguf")


def reserved_bytes(config: AdapterConfig) -> int:
    """Memory that the adapters to be loaded will take: the sizes of their files, of the largest if not all may stay."""
    sizes = [sum(map(_file_bytes, [path, *path.glob("*")])) for path in config.adapters.values()]
    return sum(sorted(sizes)[-config.max_cpu_loras :])


def numbers_in_use(inbox: Inbox, scheduler: Scheduler) -> set[int]:
    """Numbers of the adapters of live requests."""
    with inbox.changed:
        # Waiting ones twice: a preempted sequence goes back there.
        live = (*inbox.new(), *scheduler.waiting, *scheduler.running, *scheduler.waiting)
        return {each.request.adapter.number for each in live if each.request.adapter is not None}


def _file_bytes(path: Path) -> int:
    return path.stat().st_size if path.suffix in _SUFFIXES and path.is_file() else 0


@dataclass
class KnownAdapter:
    """An adapter that requests may name."""

    name: str
    path: Path
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
        model: ModelAdapters | None,
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
        self._retired: dict[int, LoadedAdapter] = {}
        """Adapters in memory, by number, that new requests no longer get."""
        self._uses = itertools.count(1)

    def known(self) -> list[KnownAdapter]:
        """All adapters, in the order of their loading."""
        with self._lock:
            return list(self._known.values())

    def load(self, name: str, path: Path) -> LoadedAdapter:
        """Make an adapter known and load it. A known name gets the new files; its running requests finish with the old.

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
            fresh = KnownAdapter(name, path)
            loaded = self._read(fresh)
            with self._lock:
                self._retire(self._known.pop(name, None))
                self._known[name] = fresh
            self._free_retired()
        return loaded

    def unload(self, name: str) -> None:
        """Forget an adapter; its running requests finish. Raises KeyError for an unknown name."""
        with self._reading:
            with self._lock:
                self._retire(self._known.pop(name))
            self._free_retired()

    def use(self, name: str) -> LoadedAdapter | None:
        """The adapter for a new request, read again if it had left memory; None: there is none of this name.

        Raises as `load`.
        """
        if (found := self._in_memory(name)) is not None or name not in self._known:
            return found
        with self._reading:
            found = self._in_memory(name)
            known = self._known.get(name)
            return self._read(known) if found is None and known is not None else found

    @contextmanager
    def submitting(self, adapter: LoadedAdapter) -> Iterator[None]:
        """Keep the adapter in memory until its request is among the live ones. Raises CapacityError if it has left."""
        with self._lock:
            if self._in_native().get(adapter.number) is not adapter:
                raise CapacityError(f"adapter {adapter.name} has just left memory; try again")
            yield

    def _in_memory(self, name: str) -> LoadedAdapter | None:
        with self._lock:
            known = self._known.get(name)
            if known is None:
                return None
            known.used = next(self._uses)
            return known.loaded

    def _in_native(self) -> dict[int, LoadedAdapter]:
        """All adapters in native memory by number."""
        return {
            each.loaded.number: each.loaded for each in self._known.values() if each.loaded
        } | self._retired

    def _retire(self, known: KnownAdapter | None) -> None:
        if known is not None and known.loaded is not None:
            self._retired[known.loaded.number] = known.loaded
            known.loaded = None

    def _read(self, known: KnownAdapter) -> LoadedAdapter:
        model = self._model
        if model is None:
            raise ConfigError("adapters are computed on the CPU; start with --accelerator none or emulated")
        adapter = read_adapter(known.path, model.shapes, name=known.name, max_rank=self._config.max_lora_rank)
        prepared = model.prepare(adapter)
        self._make_room()
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

    def _make_room(self) -> None:
        """Let idle adapters leave until one more fits."""
        self._free_retired()
        with self._lock:
            in_use = self._numbers_in_use()
            num_left = len(self._in_native()) - self._config.max_cpu_loras + 1
            idle = [each for each in self._known.values() if each.loaded and each.loaded.number not in in_use]
            if num_left > len(idle):
                raise CapacityError(
                    f"requests use all adapters that memory holds (--max-cpu-loras {self._config.max_cpu_loras}); "
                    "try later"
                )
            for known in sorted(idle, key=lambda each: each.used)[: max(num_left, 0)]:
                self._retire(known)
        self._free_retired()

    def _free_retired(self) -> None:
        """Free the memory of retired adapters that no request uses any more."""
        with self._lock:
            done = self._retired.keys() - self._numbers_in_use()
            for number in done:
                del self._retired[number]
        model = self._model
        if model is None or not done:
            return

        def drop() -> None:
            for number in done:
                model.drop(number)

        self._between_steps(drop)
