"""Atomic writer of a file of packed panels.

The file is written as `*.part`, flushed to the disk and renamed. The writer holds a lock on that part, so that two
processes never write the same file; a part left by a killed process is rewritten from the beginning.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from twofold.weights.panel_file import MAGIC, PAGE, PREFIX, Contents, Stretch
from twofold.weights.weight_format import CACHE_LINE

_PIECE_BYTES: Final = 16 * 1024 * 1024
"""Write size and alignment: the page cache then uses pages of 2 MiB."""


class PanelFileWriter:
    """Context manager: `write` and `align` in the file's order, `finish` last. Without `finish` no file remains.

    Raises:
        OSError: the disk is full or fails.
        BlockingIOError: another process writes the same file, unless `wait`.
    """

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        self.path = path
        self._part = path.with_name(f"{path.name}.part")
        self._wait = wait
        self._buffer = bytearray(_PIECE_BYTES)
        self._filled = 0
        self._written = 0

    def __enter__(self) -> Self:
        while True:
            self._file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | (0 if self._wait else fcntl.LOCK_NB))
                if os.path.samestat(os.fstat(self._file), os.stat(self._part)):
                    break
            except FileNotFoundError:
                pass  # the previous lock holder has renamed or removed it
            except BaseException:
                os.close(self._file)
                raise
            os.close(self._file)
        os.ftruncate(self._file, 0)
        self._filled = self._written = 0
        self._put(memoryview(bytes(PAGE)))  # the prefix goes there
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file >= 0:
            self._part.unlink(missing_ok=True)
            os.close(self._file)

    @property
    def at(self) -> int:
        """Offset of the next byte."""
        return self._written + self._filled

    def align(self, alignment: int) -> None:
        """Write zeros up to a multiple of `alignment`."""
        self._put(memoryview(bytes(-self.at % alignment)))

    def write(self, data: npt.NDArray[Any]) -> Stretch:
        """Append the bytes of an array."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        stretch = Stretch(self.at, len(raw), zlib.crc32(raw))
        self._put(raw)
        return stretch

    def write_aligned(self, data: npt.NDArray[Any]) -> Stretch:
        """Append the bytes of an array, aligned to a cache line."""
        self.align(CACHE_LINE)
        return self.write(data)

    def finish(self, contents: Contents) -> None:
        """Append the contents, flush everything to the disk and rename the file to its final name."""
        # One second earlier, so that a change within this second has another time on every file system.
        written_s = int(time.time()) - 1
        text = replace(contents, written_s=written_s).as_json().encode()
        offset = self.at
        self._put(memoryview(text))
        self._flush()
        prefix = PREFIX.pack(MAGIC, contents.version, zlib.crc32(text), offset, len(text))
        os.pwrite(self._file, prefix, 0)
        os.utime(self._file, (written_s, written_s))
        os.fsync(self._file)
        os.rename(self._part, self.path)
        os.close(self._file)
        self._file = -1
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _put(self, raw: memoryview) -> None:
        while len(raw):
            here = min(len(raw), _PIECE_BYTES - self._filled)
            self._buffer[self._filled : self._filled + here] = raw[:here]
            self._filled += here
            raw = raw[here:]
            if self._filled == _PIECE_BYTES:
                self._flush()

    def _flush(self) -> None:
        rest = memoryview(self._buffer)[: self._filled]
        while len(rest):
            count = os.write(self._file, rest)
            self._written += count
            rest = rest[count:]
        self._filled = 0
