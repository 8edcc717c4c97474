"""Waits for one answer, computed by the engine's own thread or by the waiting thread itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

from twofold.api.errors import KernelError
from twofold.api.types import Chunk, Usage


class Waiter:
    """Receives one answer's chunks, forwards them, and waits for the last."""

    def __init__(self, on_chunk: Callable[[Chunk], None] | None) -> None:
        self._on_chunk = on_chunk
        self._done = threading.Event()
        self._last: Chunk | None = None

    def receive(self, chunk: Chunk) -> None:
        try:
            if self._on_chunk is not None:
                self._on_chunk(chunk)
        finally:
            if chunk.finish_reason is not None:
                self._last = chunk
                self._done.set()

    def wait(self, step: Callable[[], bool] | None, cancel: Callable[[], None]) -> None:
        """Wait until the answer is finished. step: computes one step, where no other thread does.

        Raises:
            KeyboardInterrupt: re-raised after the request was cancelled.
        """
        try:
            if step is None:
                self._done.wait()
            while not self._done.is_set():
                progressed = step is not None and step()
                assert progressed or self._done.is_set(), "a request is left and nothing was scheduled"
        except KeyboardInterrupt:
            cancel()
            while not self._done.is_set():
                if step is None:
                    self._done.wait()
                else:
                    step()
            raise

    def usage(self) -> Usage:
        """Usage of the finished answer. Raises KernelError if it failed."""
        last = self._last
        if last is None or last.finish_reason == "error" or last.usage is None:
            raise KernelError((last and last.error) or "the request failed")
        return last.usage
