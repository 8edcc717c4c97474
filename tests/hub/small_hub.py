"""A small Hugging Face hub on loopback: listing, redirects of large files to another host, ranges, interruptions."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


@dataclass
class Repository:
    files: dict[str, bytes]
    commit: str = COMMIT
    gated: bool = False
    revisions: tuple[str, ...] = ("main",)

    def sibling(self, name: str) -> dict[str, Any]:
        """Large files are stored with Git LFS: these are the weights."""
        content = self.files[name]
        entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git_hash(content)}
        if is_large(name):
            entry["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 130}
        return entry


@dataclass
class SmallHub:
    """What the hub has, and what it was asked."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    url: str = ""
    requests: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    """Path and headers of each request."""
    cut_after: int | None = None
    """Bytes of a large file after which its connection is closed."""
    ignores_ranges: bool = False
    page_at: str | None = None
    """Beginning of the paths at which a login page is sent with status 200."""
    damage: bytes | None = None
    """Bytes that replace the first ones of large files."""

    def ranges(self) -> list[str]:
        return [headers.get("Range", "") for path, headers in self.requests if path.startswith("/cdn/")]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", ".bin"))


@contextmanager
def serving_hub() -> Iterator[SmallHub]:
    hub = SmallHub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: SmallHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Writes no log."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.state.requests.append((path, dict(self.headers)))
        if self.state.page_at is not None and path.startswith(self.state.page_at):
            return self._send(200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>Log in\n</html>")
        if path.startswith("/cdn/"):
            return self._content(self._by_hash(path.removeprefix("/cdn/")), {}, is_cut=True)
        if path.startswith("/api/models/"):
            repo, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            return self._listing(repo, revision)
        repo, _, rest = path.removeprefix("/").partition("/resolve/")
        commit, _, name = rest.partition("/")
        repository = self.state.repositories.get(repo)
        if repository is None or name not in repository.files or commit != repository.commit:
            return self._error(404, "EntryNotFound")
        if repository.gated:
            return self._error(403, "GatedRepo")
        headers = {"X-Repo-Commit": commit}
        if not is_large(name):
            return self._content(
                repository.files[name], headers | {"ETag": f'"{git_hash(repository.files[name])}"'}
            )
        digest = sha256(repository.files[name])
        other_host = self.state.url.replace("127.0.0.1", "localhost")
        size = str(len(repository.files[name]))
        location = {
            "Location": f"{other_host}/cdn/{digest}",
            "X-Linked-Etag": f'"{digest}"',
            "X-Linked-Size": size,
        }
        return self._send(302, headers | location, b"")

    def _by_hash(self, digest: str) -> bytes:
        contents = (c for repo in self.state.repositories.values() for c in repo.files.values())
        return next(content for content in contents if sha256(content) == digest)

    def _listing(self, repo: str, revision: str) -> None:
        found = self.state.repositories.get(repo)
        if found is None:
            return self._error(401, "RepoNotFound")
        if revision not in (*found.revisions, found.commit):
            return self._error(404, "RevisionNotFound")
        content = {"id": repo, "sha": found.commit, "siblings": [found.sibling(name) for name in found.files]}
        return self._send(200, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def _content(self, content: bytes, headers: dict[str, str], *, is_cut: bool = False) -> None:
        if is_cut and self.state.damage is not None:
            content = self.state.damage + content[len(self.state.damage) :]
        status, begin = 200, 0
        requested = self.headers.get("Range")
        if requested and not self.state.ignores_ranges:
            status, begin = 206, int(requested.removeprefix("bytes=").partition("-")[0])
            headers |= {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"}
        self._send(status, headers, content[begin:], limit=self.state.cut_after if is_cut else None)

    def _error(self, status: int, code: str) -> None:
        self._send(status, {"X-Error-Code": code, "X-Error-Message": code}, b"")

    def _send(self, status: int, headers: dict[str, str], body: bytes, limit: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:limit])
        if limit is not None and limit < len(body):
            self.close_connection = True
