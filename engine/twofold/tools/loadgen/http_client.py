"""A minimal HTTP/1.1 client with a connection per request, so that the server dominates the measured time."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from twofold.api.errors import ConfigError

_MAX_LINE: Final = 1 << 22
_MAX_ERROR_BYTES: Final = 1 << 16
_MAX_HEADERS: Final = 100


class HttpStatusError(Exception):
    """A status other than 200."""

    def __init__(self, status: int, body: bytes, retry_after: str | None = None) -> None:
        """retry_after: the header's value."""
        self.status, self.retry_after = status, retry_after
        code, message = _error_of(body)
        self.kind = f"HTTP {status}" + (f" {code}" if code else "")
        super().__init__(message or f"HTTP {status}")


def check_url(url: str, *, flag: str, allow_remote: bool) -> str:
    """`url` without a trailing slash or /v1. ConfigError unless it is http(s) and local, or remote is allowed."""
    try:
        parsed = urllib.parse.urlsplit(url)
        valid = parsed.scheme in ("http", "https") and bool(parsed.hostname) and parsed.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"{flag} {url!r} is not an address; expected e.g. http://127.0.0.1:10002")
    if not allow_remote and not _is_loopback(parsed.hostname or ""):
        raise ConfigError(
            f"{flag} {url!r} is not this machine; a load test against others' servers needs their consent. "
            "Give http://127.0.0.1:PORT, or --allow-remote-host if the server is yours"
        )
    return url.rstrip("/").removesuffix("/v1")


def _is_loopback(name: str) -> bool:
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class HttpClient:
    """Client of one server. Reads answers as they arrive."""

    base_url: str
    """As returned by `check_url`."""
    api_key: str | None = None

    async def json(self, method: str, path: str, body: object = None) -> Any:
        """The JSON of an answer.

        Raises:
            HttpStatusError: a status other than 200.
            OSError, ValueError: no connection, or invalid HTTP or JSON.
        """
        async with self._answer(method, path, None if body is None else json.dumps(body).encode()) as pieces:
            return json.loads(b"".join([piece async for piece in pieces]))

    async def text(self, path: str) -> str:
        """The text of a GET's answer. Errors as for `json`."""
        async with self._answer("GET", path, None) as pieces:
            return b"".join([piece async for piece in pieces]).decode()

    async def lines(self, path: str, body: bytes, take: Callable[[bytes], bool | None]) -> None:
        """POST `body` and pass each line of the answer to `take` as it arrives, until that returns True: then the
        connection is closed. Errors as for `json`.
        """
        async with self._answer("POST", path, body) as pieces:
            rest = b""
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _MAX_LINE:
                    raise ValueError(f"a line of the answer is longer than {_MAX_LINE} bytes")
                for line in lines:
                    if take(line):
                        return
            if rest:
                take(rest)

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: bytes | None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        url = urllib.parse.urlsplit(self.base_url)
        is_tls = url.scheme == "https"
        reader, writer = await asyncio.open_connection(
            url.hostname,
            url.port or (443 if is_tls else 80),
            limit=_MAX_LINE,
            ssl=ssl.create_default_context() if is_tls else None,
        )
        try:
            head = [f"{method} {url.path}{path} HTTP/1.1", f"Host: {url.netloc.rpartition('@')[2]}"]
            if self.api_key is not None:
                head.append(f"Authorization: Bearer {self.api_key}")
            if body is not None:
                head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
            head += ["Accept-Encoding: identity", "Connection: close", "", ""]
            writer.write("\r\n".join(head).encode() + (body or b""))
            await writer.drain()
            status, headers = await _head(reader)
            pieces = _pieces(reader, headers)
            if status != 200:
                raise HttpStatusError(status, await _beginning(pieces), headers.get("retry-after"))
            yield pieces
        finally:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, Mapping[str, str]]:
    while True:
        first = await reader.readline()
        words = first.split(maxsplit=2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            what = "closed the connection" if not first else f"sent {first[:80]!r} instead of an HTTP answer"
            raise ConnectionError(f"the server {what}")
        headers: dict[str, str] = {}
        while (line := await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
            if len(headers) > _MAX_HEADERS:
                raise ConnectionError(f"the server's answer has more than {_MAX_HEADERS} headers")
        if int(words[1]) >= 200:
            return int(words[1]), headers


async def _pieces(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The body in pieces as they arrive."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        try:
            while size := int((await _line(reader)).partition(b";")[0], 16):
                if size > _MAX_LINE:
                    raise ValueError(f"a chunk of the answer is larger than {_MAX_LINE} bytes")
                yield (await reader.readexactly(size + 2))[:-2]
        except asyncio.IncompleteReadError:
            raise _cut_off() from None
        return
    left = int(headers["content-length"]) if headers.get("content-length", "").isdigit() else None
    while left is None or left > 0:
        piece = await reader.read(1 << 16)
        if not piece:
            if left is not None:
                raise _cut_off()
            return
        left = None if left is None else left - len(piece)
        yield piece


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line:
        raise _cut_off()
    return line


def _cut_off() -> ConnectionError:
    return ConnectionError("the server closed the connection within its answer")


async def _beginning(pieces: AsyncIterator[bytes]) -> bytes:
    body = b""
    async for piece in pieces:
        body += piece
        if len(body) >= _MAX_ERROR_BYTES:
            break
    return body


def _error_of(body: bytes) -> tuple[str, str]:
    """(code or "", message) of an error in OpenAI's form, or the raw text."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or ""), str(error.get("message") or "")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "", body[:200].decode(errors="replace")
