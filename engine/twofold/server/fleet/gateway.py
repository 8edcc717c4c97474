"""The gateway: takes HTTP requests from Ray's proxy and passes each to a replica.

A request whose replica is lost before its first token goes to another replica; the client notices nothing but the time.
After the first token the stream ends with an error, because another replica cannot continue it.
"""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any, Final, cast

from ray.exceptions import RayActorError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

import twofold.server.app  # noqa: F401 (registers the error formats of the APIs)
from twofold.server.bridge.request_body import read_body
from twofold.server.fleet.forwarding import ForwardedRequest, Header, ResponseStart, WholeResponse
from twofold.server.fleet.merged_metrics import merged_metrics
from twofold.server.fleet.prefix_labels import PromptIdentity, prompt_of
from twofold.server.http.arrival import trace_id
from twofold.server.http.errors import ApiError, unavailable

_logger = logging.getLogger("twofold.server.fleet")
_MAX_TRIES: Final = 4
_METRICS_TIMEOUT_S: Final = 5.0
_HOP_BY_HOP: Final = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"expect")
)
_LOST_MESSAGE: Final = (
    "the replica that computed this answer was lost; the text so far is incomplete; send the request again"
)


class Gateway:
    """Ray Serve's callable that receives the HTTP requests."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        """replicas: Ray's handle of the `Replica` deployment."""
        self._replicas = replicas.options(method_name="handle", stream=True)
        self._every_replica = replicas
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        try:
            forwarded = await self._forwarded(request)
            if (forwarded.method, forwarded.path) == ("GET", "/metrics"):
                return await self._metrics(forwarded)
            chunks = self._chunks(forwarded)
            start = await anext(chunks)
        except ApiError as error:
            return error.response(request.url.path)
        assert isinstance(start, ResponseStart)
        response = StreamingResponse(cast(AsyncIterator[bytes], chunks), start.status)
        response.raw_headers = list(start.headers)
        return response

    async def _forwarded(self, request: Request) -> ForwardedRequest:
        body = await read_body(request, self._max_body_bytes)
        client = request.client
        prompt = prompt_of(body) if request.method == "POST" else PromptIdentity()
        return ForwardedRequest(
            method=request.method,
            path=request.url.path,
            query=request.url.query.encode(),
            headers=_headers(request),
            body=body,
            client=None if client is None else (client.host, client.port),
            labels=prompt.labels,
            model=prompt.model,
        )

    async def _metrics(self, request: ForwardedRequest) -> Response:
        """The metrics of all replicas that answer in time, or the answer of one that refuses."""
        broadcast = self._every_replica.broadcast("whole", request)
        found = await broadcast.results_async(timeout_s=_METRICS_TIMEOUT_S, return_exceptions=True)
        answers = [each for each in found if isinstance(each, WholeResponse)]
        for answer in answers:
            if answer.status != 200:
                return Response(answer.body, answer.status, dict(_text(answer.headers)))
        if not answers:
            raise unavailable("no replica answers; see the log of Ray Serve", "no_replicas", 5)
        pages = {answer.replica: answer.body.decode() for answer in answers}
        return Response(merged_metrics(pages), 200, dict(_text(answers[0].headers)))

    async def _chunks(self, request: ForwardedRequest) -> AsyncIterator[ResponseStart | bytes]:
        """Status and headers, then the body's bytes.

        The preface is kept back until the first token, so that another replica's can replace it. ApiError 503 if every
        try lost its replica before anything was sent.
        """
        is_sent = has_tokens = False
        for attempt in range(_MAX_TRIES):
            preface, parts = b"", self._replicas.remote(replace(request, attempt=attempt))
            try:
                start = await anext(parts)
                async for part in parts:
                    if part.kind == "preface":
                        preface = part.data
                        continue
                    if not is_sent:
                        yield start
                        is_sent = True
                    has_tokens = has_tokens or part.kind == "answer"
                    yield preface + part.data if has_tokens else part.data
                    preface = b"" if has_tokens else preface
                if not is_sent:
                    yield start
                yield preface
                return
            except RayActorError as error:  # also where the actor is only unreachable
                _logger.warning("a replica was lost during %s: %s", request.path, type(error).__name__)
            finally:
                parts.cancel()
            if has_tokens:
                yield _error_event(request.path, ApiError(502, _LOST_MESSAGE, code="replica_lost"))
                return
        message = (
            f"{_MAX_TRIES} replicas were lost one after the other before the answer began; try again later"
        )
        refusal = unavailable(message, "replicas_lost", 5)
        if not is_sent:
            raise refusal
        yield _error_event(request.path, refusal)


def _headers(request: Request) -> tuple[Header, ...]:
    """The client's headers. A request without an id or a trace gets one, under which every process records it."""
    kept = [pair for pair in request.headers.raw if pair[0] not in _HOP_BY_HOP]
    if not any(name == b"x-request-id" for name, _ in kept):
        kept.append((b"x-request-id", uuid.uuid4().hex.encode()))
    if not trace_id(request.headers.get("traceparent", "")):
        kept = [pair for pair in kept if pair[0] not in (b"traceparent", b"tracestate")]
        kept.append((b"traceparent", f"00-{uuid.uuid4().hex}-{secrets.token_hex(8)}-01".encode()))
    return tuple(kept)


def _text(headers: tuple[Header, ...]) -> Iterator[tuple[str, str]]:
    """Headers without the body's length, which is another one after merging."""
    return ((name.decode(), value.decode()) for name, value in headers if name != b"content-length")


def _error_event(path: str, error: ApiError) -> bytes:
    """The error as the last bytes of a stream, in the form of the API that the path belongs to."""
    body = bytes(error.response(path).body)
    if path.startswith("/api/"):
        return body + b"\n"
    if path.startswith("/v1/messages"):
        return b"\n\nevent: error\ndata: " + body + b"\n\n"
    return b"\n\ndata: " + body + b"\n\ndata: [DONE]\n\n"
