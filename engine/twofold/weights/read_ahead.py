"""Read-ahead of weights into the page cache, in request order, on its own thread.

The kernel's read-ahead for mapped files starts late and stops early: while packing a 4.6 GB file, both cores waited
half of the time. Nothing is stored here. Read errors are ignored; the later access to the mapping reports them.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

_PIECE_BYTES: Final = 4 << 20


class ReadAhead:
    """A queue of reads and the thread that does them; the thread ends when the queue is empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None

    def request(self, file: Path, begin: int, end: int) -> None:
        """Queue bytes [begin, end) of `file` for reading."""
        self.call(functools.partial(_read, file, begin, end))

    def call(self, read: Callable[[], None]) -> None:
        """Queue a function that reads."""
        with self._lock:
            self._reads.append(read)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="read-ahead", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait until all queued reads are done."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._reads:
                    self._thread = None
                    return
                read = self._reads.popleft()
            read()


def _read(file: Path, begin: int, end: int) -> None:
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return
    buffer = memoryview(bytearray(min(_PIECE_BYTES, end - begin)))
    try:
        while begin < end:
            num_bytes = os.preadv(descriptor, [buffer[: end - begin]], begin)
            if num_bytes == 0:
                return
            begin += num_bytes
    except OSError:
        return
    finally:
        os.close(descriptor)
