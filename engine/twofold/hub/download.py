"""Resumable downloads of a repository's files into the cache.

A partial file stays in the cache after an interruption, and the next call fetches the rest. Each file is compared with
its hash before it becomes a blob. (`huggingface_hub` from version 2 on starts every interrupted file again.)
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from twofold.api.errors import ModelLoadError
from twofold.hub.cache import RepoFolder
from twofold.hub.reference import HubModel
from twofold.hub.remote import NetworkError, RemoteFile, explained

_CHUNK_BYTES: Final = 1 << 20
_ATTEMPTS: Final = 5
"""Attempts without progress before giving up."""
RETRY_S: Final = 1.0
"""Pause before the next attempt."""
_WEB_PAGES: Final = ("text/html", "application/xhtml+xml")
"""Types that no file of a model has."""

ProgressFn = Callable[[int], None]
"""Receives the bytes that arrived, or were found, since the last call."""


@dataclass(frozen=True)
class Download:
    """One file to fetch."""

    model: HubModel
    commit: str
    name: str
    file: RemoteFile

    @property
    def blob(self) -> Path:
        return RepoFolder.of(self.model.repo).blob(self.file.digest)

    @property
    def part(self) -> Path:
        return self.blob.with_name(f"{self.file.digest}.incomplete")

    @property
    def missing_bytes(self) -> int:
        """Bytes that are not in the cache yet."""
        if self.blob.exists():
            return 0
        return max(0, self.file.size - (self.part.stat().st_size if self.part.exists() else 0))

    def run(self, progress: ProgressFn) -> None:
        """Fetch what is missing and check the file. ModelLoadError for a network failure or a wrong hash."""
        self.blob.parent.mkdir(parents=True, exist_ok=True)
        if self.blob.exists():
            progress(self.file.size)
            return
        with self.part.open("a+b") as part:
            fcntl.flock(part, fcntl.LOCK_EX)  # another process may be fetching the same file
            if self.blob.exists():
                progress(self.file.size)
                return
            digest = _hash_of(self.file)
            self._fetch_rest(part, digest, progress)
            if digest.hexdigest() != self.file.digest:
                part.truncate(0)
                raise ModelLoadError(
                    f"{self.model.repo}: {self.name} arrived damaged: its hash is not the one the hub states; run the "
                    "command again to fetch this file again"
                )
            os.fsync(part.fileno())
            self.part.rename(self.blob)

    def _fetch_rest(self, part: BinaryIO, digest: Any, progress: ProgressFn) -> None:
        if os.fstat(part.fileno()).st_size > self.file.size:
            part.truncate(0)
        part.seek(0)
        while chunk := part.read(_CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
        attempts = 0
        while (done := part.tell()) < self.file.size:
            failure = NetworkError(
                f"{self.model.repo}: the hub sends nothing of {self.name}; try again later"
            )
            try:
                with explained(self.model):
                    self._receive(part, digest, progress)
            except NetworkError as error:
                failure = error
            part.flush()
            attempts = 0 if part.tell() > done else attempts + 1
            if attempts >= _ATTEMPTS:
                raise failure
            if attempts:
                time.sleep(RETRY_S)

    def _receive(self, part: BinaryIO, digest: Any, progress: ProgressFn) -> None:
        """One request for the rest of the file."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

        begin = part.tell()
        url = hf_hub_url(self.model.repo, self.name, revision=self.commit)
        # Without compression: ranges count the bytes of the file.
        headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={begin}-"}
        with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
            hf_raise_for_status(response)
            if response.headers.get("Content-Type", "").startswith(_WEB_PAGES):
                raise ModelLoadError(
                    f"{self.model.repo}: the hub sent a web page in place of {self.name}, as a proxy or a login page "
                    "does; check HF_ENDPOINT and the proxy"
                )
            is_rest = response.headers.get("Content-Range", "").startswith(f"bytes {begin}-")
            skip = 0 if is_rest and response.status_code == 206 else begin
            for chunk in response.iter_bytes():  # as it arrives: an interruption loses nothing
                new, skip = chunk[skip:], max(0, skip - len(chunk))
                part.write(new)
                digest.update(new)
                progress(len(new))
                if part.tell() > self.file.size:
                    raise ModelLoadError(
                        f"{self.model.repo}: {self.name} is larger than the hub states; fetch it again"
                    )


def _hash_of(file: RemoteFile) -> Any:
    """The hash whose digest the hub states: SHA-256, or Git's of a blob."""
    if file.is_large:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
