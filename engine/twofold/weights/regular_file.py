"""Opens files that others named: a pipe or a device in its place is an error, not an endless wait."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def read_regular(path: Path, limit: int) -> tuple[bytes, int]:
    """(the file's bytes, its size); without bytes if it is larger than `limit`. Raises OSError as `open_regular`."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        return (b"", size) if size > limit else (stream.read(), size)


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
