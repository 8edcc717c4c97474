"""Opens files that others named: a pipe or a device in its place is an error, not an endless wait."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

_PIECE: Final = 1 << 20


def read_regular(path: Path, limit: int) -> tuple[bytes, int]:
    """(the file's bytes, its size); without bytes if it is larger than `limit`. Raises OSError as `open_regular`."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            return b"", size
        # A file of /proc has the size 0, and another process may be writing to this one. A read allocates all that it
        # asks for.
        data = stream.read(size)
        while len(data) <= limit and (piece := stream.read(min(_PIECE, limit + 1 - len(data)))):
            data += piece
        return (b"", len(data)) if len(data) > limit else (data, len(data))


def read_regular_text(path: Path, limit: int = 64 << 20) -> str:
    """UTF-8 text of a file of at most `limit` bytes. Raises OSError, also for a larger one, and UnicodeDecodeError."""
    data, size = read_regular(path, limit)
    if size > limit:
        raise OSError(errno.EFBIG, f"it has {size} bytes, expected at most {limit}", str(path))
    return data.decode("utf-8")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, also for everything that is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "expected a regular file, found a pipe, socket or device", str(path))
