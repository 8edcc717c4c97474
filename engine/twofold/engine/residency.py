"""Loads mapped panels into memory in layer order while requests are already being served."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Final

from twofold.api.types import MappedWeights
from twofold.blocks.panels import MappedPanels

_log = logging.getLogger(__name__)
_PIECE_BYTES: Final = 32 * 1024 * 1024
_NICENESS: Final = 10
"""Niceness of the reading thread: computing threads go first."""


class Residency:
    """A thread that reads and maps a file's panels once; `close` stops it early."""

    def __init__(self, panels: MappedPanels) -> None:
        self._panels = panels
        self._total = panels.contents.panels_end
        self._done = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="twofold-residency", daemon=True)
        self._thread.start()

    @property
    def weights(self) -> MappedWeights:
        return MappedWeights(self._total, self._done)

    def close(self) -> None:
        """Safe to call twice."""
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        begun = time.perf_counter()
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # for this thread only
            while self._done < self._total and not self._closing.is_set():
                num_bytes = min(_PIECE_BYTES, self._total - self._done)
                self._panels.mapping.populate(self._done, num_bytes)
                self._done += num_bytes
        except OSError as error:
            _log.error("%s: cannot be read: %s; check the disk", self._panels.path, error.strerror)
            return
        if self._done == self._total:
            seconds = time.perf_counter() - begun
            _log.info(
                "%s: %.2f GB of panels are resident after %.2f s",
                self._panels.path,
                self._total / 1e9,
                seconds,
            )
