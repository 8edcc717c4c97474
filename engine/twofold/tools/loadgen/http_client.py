"""HTTP client of the load generator: a connection per request, as many users would open."""

from __future__ import annotations

import itertools
import json
import os
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx

from twofold.api.addresses import is_loopback
from twofold.api.config import DEFAULT_URL
from twofold.api.errors import ConfigError
from twofold.tools.loadgen import stamped_stream

_MAX_ERROR_BYTES: Final = 1 << 16

TakeLine = Callable[[bytes, float], bool | None]
"""Takes a line and the monotonic time at which it came; True ends reading."""


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
        raise ConfigError(f"{flag} {url!r} is not an address; expected e.g. {DEFAULT_URL}")
    if not allow_remote and not is_loopback(parsed.hostname or ""):
        raise ConfigError(
            f"{flag} {url!r} is not this machine; a load test against others' servers needs their consent. "
            "Give http://127.0.0.1:PORT, or --allow-remote-host if the server is yours"
        )
    return url.rstrip("/").removesuffix("/v1")


def api_key() -> str | None:
    """The key for a running server, from the environment."""
    return os.environ.get("OPENAI_API_KEY") or os.environ.get("TWOFOLD_API_KEY") or None


def served_model(listed: Any, wanted: str | None = None) -> tuple[str, int | None]:
    """(name, tokens of its context if stated) of the wanted or first model in what GET /v1/models answered.

    ValueError if it lists none.
    """
    try:
        cards = listed["data"]
        card = next((card for card in cards if card["id"] == wanted), cards[0])
        context = card.get("max_model_len")
        return wanted or str(card["id"]), context if isinstance(context, int) else None
    except (LookupError, TypeError, AttributeError):
        raise ValueError(
            "/v1/models lists no model; name one: --served-model-name of bench serve, --model of loadtest"
        ) from None


def _settings(base_url: str, api_key: str | None) -> dict[str, Any]:
    """Settings of both clients: no proxy, no redirect, no connection kept."""
    headers = {"Accept-Encoding": "identity"}
    return {
        "headers": headers if api_key is None else headers | {"Authorization": f"Bearer {api_key}"},
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=0),
        # The caller bounds a request as a whole.
        "timeout": None,
        "trust_env": False,
        # Reading the certificates takes tens of milliseconds.
        "verify": base_url.startswith("https:"),
    }


class _LineSplitter:
    """Passes whole lines on to `take`, with the time of their last piece, until that returns True."""

    def __init__(self, take: TakeLine) -> None:
        self._take, self._rest, self._at_s = take, b"", 0.0

    def add(self, piece: bytes, at_s: float) -> bool:
        """Whether reading ends. Not httpx' iter_lines, which also splits at line separators within JSON texts."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        self._at_s = at_s
        return any(self._take(line, at_s) for line in lines)

    def end(self) -> None:
        if self._rest:
            self._take(self._rest, self._at_s)


_SENT: Final = "http11.send_request_headers.complete"
"""httpcore's event after the head of a request has been written."""


def _do_nothing() -> None:
    pass


class BlockingHttpClient:
    """Client of one server for threads and green threads; the settings are those of HttpClient."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        """`base_url`: as returned by `check_url`."""
        self.base_url = base_url
        self._client = httpx.Client(**_settings(base_url, api_key))

    def lines(
        self,
        path: str,
        body: bytes,
        take: TakeLine,
        on_sent: Callable[[], None] = _do_nothing,
    ) -> None:
        """As HttpClient.lines. The caller bounds the request as a whole."""
        url, headers = self.base_url + path, {"Content-Type": "application/json"}
        splitter = _LineSplitter(take)

        def trace(event: str, _: object) -> None:
            if event == _SENT:
                on_sent()

        traced = {"trace": trace}
        try:
            with self._client.stream("POST", url, content=body, headers=headers, extensions=traced) as answer:
                if answer.status_code != 200:
                    beginning = b"".join(itertools.islice(answer.iter_bytes(_MAX_ERROR_BYTES), 1))
                    raise HttpStatusError(answer.status_code, beginning, answer.headers.get("retry-after"))
                for piece in answer.iter_bytes():
                    if splitter.add(piece, time.perf_counter()):
                        return
                splitter.end()
        except httpx.HTTPError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error

    def json(self, method: str, path: str, body: object = None, *, timeout_s: float = 10.0) -> Any:
        """The JSON of an answer. Errors as for HttpClient.json."""
        try:
            answer = self._client.request(method, self.base_url + path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        if answer.status_code != 200:
            raise HttpStatusError(answer.status_code, answer.content[:_MAX_ERROR_BYTES])
        return answer.json()

    def close(self) -> None:
        self._client.close()


class HttpClient:
    """Client of one server. Reads answers as they arrive; follows no redirect and no proxy."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        """`base_url`: as returned by `check_url`."""
        self.base_url = base_url
        settings = _settings(base_url, api_key)
        self._headers: dict[str, str] = settings["headers"]
        self._tls_context: ssl.SSLContext | None = None
        self._client = httpx.AsyncClient(**settings)

    async def json(self, method: str, path: str, body: object = None) -> Any:
        """The JSON of an answer.

        Raises:
            HttpStatusError: a status other than 200.
            OSError, ValueError: no connection, or invalid HTTP or JSON.
        """
        async with self._answer(method, path, None if body is None else json.dumps(body).encode()) as answer:
            return json.loads(await answer.aread())

    async def text(self, path: str) -> str:
        """The text of a GET's answer. Errors as for `json`."""
        async with self._answer("GET", path, None) as answer:
            return (await answer.aread()).decode()

    async def lines(
        self,
        path: str,
        body: bytes,
        take: TakeLine,
        on_sent: Callable[[], None] = _do_nothing,
    ) -> None:
        """POST `body` and pass each line of the answer to `take`, with the loop's time at which its socket was read,
        until that returns True: then the connection is closed. `on_sent`: called when the request is with the kernel.
        Errors as for `json`.
        """

        headers = {**self._headers, "Content-Type": "application/json"}
        url = self.base_url + path
        async with stamped_stream.post(url, body, headers, tls=self._tls(), on_sent=on_sent) as answer:
            if answer.status != 200:
                beginning = b""
                async for piece, _ in answer.pieces:
                    beginning += piece
                    if len(beginning) >= _MAX_ERROR_BYTES:
                        break
                raise HttpStatusError(answer.status, beginning, answer.headers.get("retry-after"))
            splitter = _LineSplitter(take)
            async for piece, at_s in answer.pieces:
                if splitter.add(piece, at_s):
                    return
            splitter.end()

    def _tls(self) -> ssl.SSLContext | None:
        if self._tls_context is None and self.base_url.startswith("https:"):
            self._tls_context = httpx.create_ssl_context(trust_env=False)
        return self._tls_context

    @asynccontextmanager
    async def _answer(self, method: str, path: str, body: bytes | None) -> AsyncIterator[httpx.Response]:
        headers = {} if body is None else {"Content-Type": "application/json"}
        url = self.base_url + path
        try:
            async with self._client.stream(method, url, content=body, headers=headers) as answer:
                if answer.status_code != 200:
                    retry_after = answer.headers.get("retry-after")
                    raise HttpStatusError(answer.status_code, await _beginning(answer), retry_after)
                yield answer
        except httpx.HTTPError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error


async def _beginning(answer: httpx.Response) -> bytes:
    body = b""
    async for piece in answer.aiter_bytes():
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
