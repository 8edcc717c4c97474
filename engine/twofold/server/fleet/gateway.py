"""The gateway: answers each HTTP request with one of the replicas, over kept-alive connections of its own.

A request whose replica is lost before its first token goes to another replica; the client notices nothing but the time.
After the first token the stream ends with an error, because another replica cannot continue it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import aiohttp
import yarl
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

import twofold.server.app  # noqa: F401 (registers the error formats of the APIs)
from twofold.api.config import ServerConfig
from twofold.server.bridge.observe.request_log import RequestLog
from twofold.server.bridge.requests.connected import while_connected
from twofold.server.bridge.requests.request_body import read_body
from twofold.server.fleet.forwarding import ROUTING_HEADER, TOKENS_BEGIN, Header, RoutedRequest, is_stream
from twofold.server.fleet.merged_metrics import merged_metrics
from twofold.server.fleet.prefix_labels import PromptIdentity, prompt_of
from twofold.server.fleet.serving_actor import ServingActor
from twofold.server.http.arrival import trace_id
from twofold.server.http.errors import ApiError, unavailable
from twofold.server.listening import bind, certificate_of

_logger = logging.getLogger("twofold.server.fleet")
_MAX_TRIES: Final = 4
_METRICS_TIMEOUT_S: Final = 5.0
_CONNECT_TIMEOUT_S: Final = 3.0
_KEEP_ALIVE_S: Final = 30.0
"""Less than replicas keep a connection open (`ConnectionLimits`), so that none is closed while a request is sent."""
_LOST_PEER: Final = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""A machine that is gone is noticed after 20 seconds of silence."""
_OF_CONNECTION: Final = frozenset(
    b"connection keep-alive transfer-encoding te upgrade expect content-length date".split()
)
"""Headers that each connection sets itself."""
_LOST_MESSAGE: Final = (
    "the replica that computed this answer was lost; the text so far is incomplete; send the request again"
)


class Gateway:
    """ASGI application that forwards requests."""

    def __init__(self, replicas: Any, client: aiohttp.ClientSession, max_body_bytes: int) -> None:
        """replicas: Ray's handle of the `Replica` deployment, whose router is a `PrefixRouter`."""
        self._replicas = replicas
        self._client = client
        self._max_body_bytes = max_body_bytes
        self._log = RequestLog(logs_all=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(Request(scope, receive), self._max_body_bytes)
            await while_connected(self._answer(scope, body, send), receive)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            self._log.write(scope, error.status, "")
        except ClientDisconnect:
            return  # before its body was complete

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        """Send a replica's response. ApiError 503 if every try lost its replica before anything was sent."""
        prompt = prompt_of(body) if scope["method"] == "POST" else PromptIdentity()
        request, response = RoutedRequest(prompt.labels, prompt.model), _Response(send)
        ask = partial(self._ask, scope, _headers(scope["headers"]), request)
        for request.attempt in range(_MAX_TRIES):
            is_lost = False
            try:
                async with self._replicas.choose_replica(request, _reserve=False) as chosen:
                    pass  # the request itself goes another way
                async with ask(chosen.replica_id, body) as answer:
                    is_metrics = (scope["path"], answer.status) == ("/metrics", 200)
                    await response.take(answer, await _metrics(ask, request.replicas) if is_metrics else None)
                return
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                is_lost = True
                _logger.warning("a replica was lost during %s: %s", scope["path"], type(error).__name__)
            finally:
                request.end(is_lost)
                request.end = lambda is_lost: None
            if response.has_tokens:
                await response.end(
                    _error_event(scope["path"], ApiError(502, _LOST_MESSAGE, code="replica_lost"))
                )
                return
        message = (
            f"{_MAX_TRIES} replicas were lost one after the other before the answer began; try again later"
        )
        refusal = unavailable(message, "replicas_lost", 5)
        if not response.has_begun:
            raise refusal
        await response.end(_error_event(scope["path"], refusal))

    def _ask(
        self, scope: Scope, headers: list[tuple[str, str]], request: RoutedRequest, replica: str, body: bytes
    ) -> Any:
        """The request to a replica, as a context of its response."""
        known = request.replicas[replica]
        query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        routing_header = ROUTING_HEADER.decode(), request.header(scope["client"], known["secret"])
        return self._client.request(
            scope["method"],
            yarl.URL(f"{known['url']}{scope['raw_path'].decode()}{query}", encoded=True),
            data=body or None,
            headers=[*headers, routing_header],
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            allow_redirects=False,
        )


class _Response:
    """The client's response, begun by one replica and perhaps continued by another."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False
        self.has_tokens = False

    async def take(self, answer: aiohttp.ClientResponse, body: bytes | None = None) -> None:
        """Pass a replica's response on, a stream as it arrives; `body` replaces its own."""
        if is_stream(answer.raw_headers):
            await self._stream(answer)
            return
        whole = await answer.read() if body is None else body
        await self._begin(answer, (b"content-length", str(len(whole)).encode()))
        await self.end(whole)

    async def _stream(self, answer: aiohttp.ClientResponse) -> None:
        async for data in answer.content.iter_any():
            if not self.has_tokens:
                pings, mark, tokens = data.partition(TOKENS_BEGIN)
                self.has_tokens, data = bool(mark), pings + tokens
            await self._begin(answer)
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        await self._begin(answer)
        await self.end(b"")

    async def end(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data})

    async def _begin(self, answer: aiohttp.ClientResponse, *further: Header) -> None:
        if self.has_begun:
            return
        self.has_begun = True
        headers = [(name.lower(), value) for name, value in answer.raw_headers]
        kept = [pair for pair in headers if pair[0] not in _OF_CONNECTION]
        await self._send(
            {"type": "http.response.start", "status": answer.status, "headers": [*kept, *further]}
        )


class GatewayActor(ServingActor):
    """Ray Serve's callable that listens on the fleet's address. Several may share the port of one machine."""

    async def __init__(self, replicas: Any, config: ServerConfig) -> None:  # type: ignore[misc]
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, socket_factory=_socket)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        self._client = aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        )
        # `options` begins to follow the replicas.
        gateway = Gateway(replicas.options(stream=True), self._client, config.max_body_bytes)
        self.start(gateway, bind(config, is_shared=True), config, certificate_of(config))

    async def __del__(self) -> None:
        """Called once by Ray."""
        if hasattr(self, "_serving"):
            await self.drain()
            await self._client.close()


async def _metrics(ask: Callable[[str, bytes], Any], replicas: Iterable[str]) -> bytes:
    """The metrics of all replicas that answer in time."""

    async def page(replica: str) -> tuple[str, str]:
        async with asyncio.timeout(_METRICS_TIMEOUT_S), ask(replica, b"") as answer:
            return replica, await answer.text()

    found = await asyncio.gather(*map(page, replicas), return_exceptions=True)
    return merged_metrics(dict(each for each in found if isinstance(each, tuple))).encode()


def _socket(address: Any) -> socket.socket:
    """A socket that notices a lost machine, for `getaddrinfo`'s description of an address."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _LOST_PEER.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def _headers(given: list[Header]) -> list[tuple[str, str]]:
    """The client's headers. A request without an id or a trace gets one, under which every process records it."""
    left_out = {*_OF_CONNECTION, b"content-encoding"}  # the body was decompressed to read its prompt
    kept = [(name.decode(), value.decode(errors="replace")) for name, value in given if name not in left_out]
    names = dict(kept)
    if "x-request-id" not in names:
        kept.append(("x-request-id", uuid.uuid4().hex))
    if not trace_id(names.get("traceparent", "")):
        kept = [pair for pair in kept if pair[0] not in ("traceparent", "tracestate")]
        kept.append(("traceparent", f"00-{uuid.uuid4().hex}-{secrets.token_hex(8)}-01"))
    return kept


def _error_event(path: str, error: ApiError) -> bytes:
    """The error as the last bytes of a stream, in the form of the API that the path belongs to."""
    body = bytes(error.response(path).body)
    if path.startswith("/api/"):
        return body + b"\n"
    if path.startswith("/v1/messages"):
        return b"\n\nevent: error\ndata: " + body + b"\n\n"
    return b"\n\ndata: " + body + b"\n\ndata: [DONE]\n\n"
