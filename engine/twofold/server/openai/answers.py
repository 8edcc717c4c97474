"""Sends an answer, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from twofold.api.types import Chunk, Usage
from twofold.server.bridge.models.crossing import AnswerStream
from twofold.server.bridge.observe.metrics import RequestTimer
from twofold.server.bridge.requests.connected import ConnectedAnswer
from twofold.server.http.arrival import call_answer_hook, set_problem
from twofold.server.http.errors import ApiError
from twofold.server.openai.formats import AnswerFormat, joined_chunks

PING_S: Final = 5.0
"""Seconds of silence before a stream sends `AnswerFormat.stream_ping`; clients time out after a minute or more."""


class AnswerResponse(ConnectedAnswer):
    """An answer in an API's format."""

    def __init__(self, answer: AnswerStream, form: AnswerFormat, timers: Sequence[RequestTimer]) -> None:
        """`timers`: one per answer."""
        super().__init__(answer, timers)
        self.form = form


class StreamedAnswer(AnswerResponse):
    """A stream in the format's own form: server-sent events, one per chunk, then [DONE]."""

    _sent_s = 0.0
    """Loop time of the stream's last bytes of the answer."""

    async def deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", self.form.stream_type),
            (b"cache-control", b"no-cache"),
            # nginx would otherwise buffer events.
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send_body(send, self.form.first_events())
        pings = asyncio.create_task(self._ping(send))
        usages: dict[int, Usage] = {}
        has_begun = False
        try:
            async for batch in self.batches():
                if not has_begun:
                    call_answer_hook(scope)
                    has_begun = True
                usages |= {index: chunk.usage for index, chunk in batch if chunk.usage is not None}
                await self._send_body(
                    send, b"".join(self.form.events(index, chunk) for index, chunk in batch)
                )
            ending = self.form.stream_end(self.form.total(usages))
        except ApiError as error:
            call_answer_hook(scope)
            set_problem(scope, error.status, error.logged)
            ending = self.form.held_back() + self.form.stream_error(error)
        finally:
            pings.cancel()
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    async def _send_body(self, send: Send, body: bytes) -> None:
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._sent_s = asyncio.get_running_loop().time()

    async def _ping(self, send: Send) -> None:
        """Send a ping after every `PING_S` of silence: while the request waits, during prefill, and while the model's
        output is hidden."""
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()
        while True:
            before, num_pings = self._sent_s, 1
            await asyncio.sleep(before + PING_S - loop.time())
            while self._sent_s == before:
                ping = self.form.ping(num_pings * PING_S)
                await send({"type": "http.response.body", "body": ping, "more_body": True})
                num_pings += 1
                await asyncio.sleep(before + num_pings * PING_S - loop.time())


class WholeAnswer(AnswerResponse):
    """One JSON body once the answer is complete; an error keeps its HTTP code."""

    async def deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks: list[list[Chunk]] = [[] for _ in self.timers]
        try:
            async for batch in self.batches():
                for index, chunk in batch:
                    chunks[index].append(chunk)
                    self.form.observe(index, chunk)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        await JSONResponse(self.form.whole([joined_chunks(parts) for parts in chunks]))(scope, receive, send)
