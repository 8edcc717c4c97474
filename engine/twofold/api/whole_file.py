"""Files that are there whole or not at all: a reader, or a crash, never meets a part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """An empty file beside `path`, to be written in the block, which takes the place of `path` when the block ends.

    If the block raises, what was written goes and `path` is as it was. mode: permissions, before the umask.

    Raises:
        OSError: the directory is not there or cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
