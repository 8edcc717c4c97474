"""Atomic file writes: neither a reader nor a crash leaves a partial file visible."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield an empty temporary file beside `path` that replaces `path` when the block ends.

    If the block raises, the temporary file is removed and `path` is unchanged. mode: permissions, before the umask.

    Raises:
        OSError: the directory does not exist or cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
