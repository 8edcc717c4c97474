"""Sends an answer, streamed or whole, and notices when the client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from twofold.api.types import Chunk, Usage
from twofold.server.api_errors import ApiError
from twofold.server.bridge import AnswerStream
from twofold.server.connections import PROBE_KEY
from twofold.server.formats import AnswerFormat, joined_chunks
from twofold.server.metrics import RequestTimer

PING_S: Final = 10.0
"""How long a stream with `AnswerFormat.stream_ping` may be silent; clients give up after about a minute."""


class AnswerResponse(Response):
    """Runs the sending and a watch on the connection side by side; whichever ends first ends both.

    Whatever happens (complete, hung up, server stopping) the answer is closed, so its place in the engine is
    free.
    """

    def __init__(self, answer: AnswerStream, form: AnswerFormat, timers: Sequence[RequestTimer]) -> None:
        """`timers`: one for each of the answers."""
        super().__init__()
        self.answer = answer
        self.form = form
        self.timers = timers

    async def deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("StreamedAnswer and WholeAnswer each deliver in their own way")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivery = asyncio.create_task(self.deliver(scope, receive, send))
        watch = asyncio.create_task(_until_disconnected(receive))
        try:
            await asyncio.wait({delivery, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            delivery_done = delivery.done()
            for task in (delivery, watch):
                task.cancel()
            await asyncio.gather(delivery, watch, return_exceptions=True)
            self.answer.close()
            for timer in self.timers:
                timer.end()
        if delivery_done:
            delivery.result()

    async def batches(self) -> AsyncIterator[list[tuple[int, Chunk]]]:
        """The answers' chunks, timed; raises ApiError when the engine gave one of them up."""
        async for batch in self.answer.batches():
            good: list[tuple[int, Chunk]] = []
            given_up: Chunk | None = None
            for index, chunk in batch:
                self.timers[index].saw([chunk])
                if chunk.finish_reason in ("error", "cancelled"):
                    given_up = given_up or chunk
                    # What was computed before the failure still belongs to the client.
                    good.append((index, chunk._replace(finish_reason=None)))
                else:
                    good.append((index, chunk))
            yield good
            if given_up is not None:
                raise _given_up(given_up)


class StreamedAnswer(AnswerResponse):
    """As the format has it: server-sent events, one per chunk, then [DONE]."""

    _num_sent = 0
    """Batches."""

    async def deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[PROBE_KEY] = self.form.stream_probe
        headers = [
            (b"content-type", self.form.stream_type),
            (b"cache-control", b"no-cache"),
            # nginx would otherwise hold events back.
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_part(send, self.form.first_events())
        pings = None if self.form.stream_ping is None else asyncio.create_task(self._ping(send))
        usages: dict[int, Usage] = {}
        try:
            async for batch in self.batches():
                usages |= {index: chunk.usage for index, chunk in batch if chunk.usage is not None}
                await _send_part(send, b"".join(self.form.events(index, chunk) for index, chunk in batch))
                self._num_sent += 1
            ending = self.form.stream_end(self.form.total(usages))
        except ApiError as error:
            ending = self.form.held_back() + self.form.stream_error(error)
        finally:
            if pings is not None:
                pings.cancel()
        await send({"type": "http.response.body", "body": ending, "more_body": False})

    async def _ping(self, send: Send) -> None:
        """Say that the answer is still being made whenever it has said nothing for a while."""
        assert self.form.stream_ping is not None
        while True:
            before = self._num_sent
            await asyncio.sleep(PING_S)
            if self._num_sent == before:
                await _send_part(send, self.form.stream_ping)


class WholeAnswer(AnswerResponse):
    """One JSON body when everything is there; an error keeps its HTTP code."""

    async def deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks: list[list[Chunk]] = [[] for _ in self.timers]
        try:
            async for batch in self.batches():
                for index, chunk in batch:
                    chunks[index].append(chunk)
                    self.form.saw(index, chunk)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        await JSONResponse(self.form.whole([joined_chunks(parts) for parts in chunks]))(scope, receive, send)


def _given_up(last: Chunk) -> ApiError:
    if last.finish_reason == "error":
        message = last.error or "the engine failed while it computed this answer"
        return ApiError(500, message, kind="server_error", code="engine_error")
    return ApiError(
        503,
        "the server is shutting down and gave this answer up; send the request again later",
        kind="server_error",
        code="server_draining",
        headers={"Retry-After": "5"},
    )


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_part(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})
