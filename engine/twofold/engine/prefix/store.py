"""The prefix cache's files on disk: one per page and one per snapshot of a record, named by the page's digest.

A background thread writes each file atomically, with a checksum. A damaged or foreign file is skipped with a log line,
and its contents are computed again. The digests' first link covers everything that decides a page besides its tokens,
so another model's files never match. Above the size limit the least recently used files are removed. Of one prefix the
last pages are removed first, because they have no value without the pages before.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import struct
import threading
import time
from hashlib import blake2b
from pathlib import Path
from typing import Final, Literal

from twofold.api.regular_file import open_regular

_log = logging.getLogger(__name__)

Kind = Literal["page", "record"]
_HEAD: Final = struct.Struct("<8s32sQ32s")
"""Magic, digest of the tokens, number of bytes, checksum of all of these and the bytes."""
_MARK: Final = b"TFprefx1"
_QUEUE_BYTES: Final = 256 * 2**20
"""Maximum bytes waiting to be written; above it, pages evicted during a step are dropped."""
_STAMP_PER_TOKEN_S: Final = 1e-6
"""Seconds by which a page counts as older per token of its position."""


class PrefixStore:
    """The store's files in one directory. Used by the threads of one process's engines; a lock excludes other
    processes."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Raises OSError if the directory cannot be made or read, or another process writes there."""
        self._directory = directory
        self.max_bytes = max_bytes
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # keys and values reveal the prompt
        self._lock_file = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._files = self._scan()
            self._used = sum(num_bytes for num_bytes, _ in self._files.values())
        except OSError:
            os.close(self._lock_file)
            raise
        self._waiting: queue.Queue[tuple[Kind, bytes, bytes, int] | None] = queue.Queue()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._failed = False
        self.num_dropped = 0
        self._writer = threading.Thread(target=self._write_all, name="twofold-prefixes", daemon=True)
        self._writer.start()

    def has(self, kind: Kind, digest: bytes) -> bool:
        return (digest, kind) in self._files

    def put(self, kind: Kind, digest: bytes, data: bytes, end: int, *, wait: bool = False) -> bool:
        """Queue data for writing. With a full queue, `wait` blocks until there is room. False: dropped."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._failed or self._waiting_bytes < _QUEUE_BYTES)
            if self._failed or self._waiting_bytes >= _QUEUE_BYTES:
                self.num_dropped += 1
                return False
            self._waiting_bytes += len(data)
        self._waiting.put((kind, digest, data, end))
        return True

    def get(self, kind: Kind, digest: bytes, num_bytes: int, end: int) -> bytes | None:
        """Read stored data of `num_bytes` bytes; None if it is missing or damaged."""
        path = self._path(kind, digest)
        try:
            with open_regular(path) as file:
                head = file.read(_HEAD.size)
                data = file.read(num_bytes + 1)
            stamp = _stamp(end)
            os.utime(path, (stamp, stamp))
        except OSError as error:
            self._discard_damaged(kind, digest, str(error))
            return None
        if len(data) != num_bytes or head != _head(kind, digest, data):
            self._discard_damaged(kind, digest, "it is damaged or of another format")
            return None
        with self._changed:
            if (digest, kind) in self._files:  # the writer may have removed it meanwhile
                self._files[digest, kind] = (_HEAD.size + num_bytes, stamp)
        return data

    def flush(self) -> None:
        """Wait until everything queued is written, or dropped."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._waiting_bytes == 0)

    def close(self) -> None:
        """Write everything queued, then stop."""
        self._waiting.put(None)
        self._writer.join()
        os.close(self._lock_file)

    # ---- files ------------------------------------------------------------------------------------------------------

    def _scan(self) -> dict[tuple[bytes, Kind], tuple[int, float]]:
        """Size and last use of each file that belongs to the store."""
        files: dict[tuple[bytes, Kind], tuple[int, float]] = {}
        for entry in os.scandir(self._directory):
            name, _, suffix = entry.name.partition(".")
            if suffix == "part":  # left by a process that died while writing
                os.unlink(entry.path)
            if suffix not in ("page", "record") or len(name) != 64:
                continue
            with contextlib.suppress(ValueError, OSError):
                status = entry.stat(follow_symlinks=False)
                kind: Kind = "page" if suffix == "page" else "record"
                files[bytes.fromhex(name), kind] = (status.st_size, status.st_mtime)
        return files

    def _path(self, kind: Kind, digest: bytes) -> Path:
        return self._directory / f"{digest.hex()}.{kind}"

    def _discard_damaged(self, kind: Kind, digest: bytes, why: str) -> None:
        if self._remove(kind, digest):
            _log.warning("--prefix-cache-dir: %s is skipped: %s", self._path(kind, digest), why)

    def _remove(self, kind: Kind, digest: bytes) -> bool:
        with self._changed:
            found = self._files.pop((digest, kind), None)
            self._used -= 0 if found is None else found[0]
        return found is not None

    def _write_all(self) -> None:
        while (item := self._waiting.get()) is not None:
            kind, digest, data, end = item
            try:
                if not self._failed and not self.has(kind, digest):
                    self._write(kind, digest, data, end)
            except OSError as error:
                self._failed = True
                _log.warning(
                    "--prefix-cache-dir %s: %s; nothing more is written there", self._directory, error
                )
            with self._changed:
                self._waiting_bytes -= len(data)
                self._changed.notify_all()

    def _write(self, kind: Kind, digest: bytes, data: bytes, end: int) -> None:
        size = _HEAD.size + len(data)
        if not self._make_room(size):
            return
        path, part = self._path(kind, digest), self._directory / "new.part"
        try:
            with os.fdopen(os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
                file.write(_head(kind, digest, data))
                file.write(data)
            stamp = _stamp(end)
            os.utime(part, (stamp, stamp))
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        with self._changed:
            self._files[digest, kind] = (size, stamp)
            self._used += size

    def _make_room(self, size: int) -> bool:
        """Remove the least recently used files until `size` more bytes fit, leaving a tenth of the limit free."""
        if size > self.max_bytes:
            return False
        if self._used + size <= self.max_bytes:
            return True
        with self._changed:
            by_use = sorted(self._files.items(), key=lambda item: item[1][1])
        for (digest, kind), _ in by_use:
            self._path(kind, digest).unlink(missing_ok=True)
            self._remove(kind, digest)
            if self._used + size <= 0.9 * self.max_bytes:
                break
        return True


def _head(kind: Kind, digest: bytes, data: bytes) -> bytes:
    checksum = blake2b(b"%b %b %d " % (kind.encode(), digest, len(data)), digest_size=32)
    checksum.update(data)
    return _HEAD.pack(_MARK, digest, len(data), checksum.digest())


def _stamp(end: int) -> float:
    return time.time() - end * _STAMP_PER_TOKEN_S
