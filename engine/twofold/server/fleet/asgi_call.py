"""Calls an ASGI application in this process and yields its response as parts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Literal

from starlette.types import ASGIApp, Message

from twofold.api.request_origin import RequestOrigin
from twofold.server.fleet.forwarding import BodyPart, ForwardedRequest, ResponseStart
from twofold.server.http.arrival import set_answer_hook, set_origin, set_prefix_labels

_STREAMS = (b"text/event-stream", b"application/x-ndjson")


async def respond(
    app: ASGIApp, request: ForwardedRequest, replica: str = ""
) -> AsyncIterator[ResponseStart | BodyPart]:
    """The response of the application in `replica`. Closing the iterator early is a disconnect of the client."""
    call = _Call(request, replica)
    task = asyncio.ensure_future(call.run(app))
    try:
        while (part := await call.next_part()) is not None:
            yield part
        await task
    finally:
        call.disconnected.set()
        # The application frees the request's place when it sees the disconnect.
        await asyncio.wait({task}, timeout=5.0)
        task.cancel()


class _Call:
    """One request on its way through the application."""

    def __init__(self, request: ForwardedRequest, replica: str) -> None:
        self.disconnected = asyncio.Event()
        self._request = request
        self._origin = RequestOrigin(routed_by=request.routed_by(replica))
        self._replica = replica.encode()
        self._is_read = False
        self._parts: deque[ResponseStart | BodyPart] = deque()
        self._changed = asyncio.Event()
        self._is_over = False
        self._waits_for_tokens = False
        self._has_preface = False

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self._scope(), self._receive, self._send)
        finally:
            self._is_over = True
            self._changed.set()

    async def next_part(self) -> ResponseStart | BodyPart | None:
        """The next part, joined with later ones of its kind that are already there; None after the last."""
        while not self._parts:
            if self._is_over:
                return None
            self._changed.clear()
            await self._changed.wait()
        part = self._parts.popleft()
        if isinstance(part, ResponseStart):
            return part
        data = [part.data]
        while self._parts and isinstance(later := self._parts[0], BodyPart) and later.kind == part.kind:
            data.append(later.data)
            self._parts.popleft()
        return BodyPart(part.kind, b"".join(data))

    def _put(self, part: ResponseStart | BodyPart) -> None:
        self._parts.append(part)
        self._changed.set()

    def _scope(self) -> dict[str, Any]:
        request = self._request
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": request.path,
            "raw_path": request.path.encode(),
            "query_string": request.query,
            "root_path": "",
            "headers": list(request.headers),
            "client": request.client,
            "server": None,
            "state": {},
        }
        set_prefix_labels(scope, request.labels)
        set_origin(scope, self._origin)
        set_answer_hook(scope, self._tokens_begin)
        return scope

    def _tokens_begin(self) -> None:
        self._waits_for_tokens = False

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = (*message.get("headers", ()), (b"x-twofold-replica", self._replica))
            kind = dict(headers).get(b"content-type", b"").partition(b";")[0]
            self._waits_for_tokens = kind in _STREAMS
            self._put(ResponseStart(message["status"], headers))
        elif data := message.get("body", b""):
            self._put(BodyPart(self._kind(), data))

    def _kind(self) -> Literal["preface", "ping", "answer"]:
        if not self._waits_for_tokens:
            return "answer"
        if self._has_preface:
            return "ping"
        self._has_preface = True
        return "preface"
