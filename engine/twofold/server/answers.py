"""Sends an answer, streamed or whole, and notices when the client hangs up."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from twofold.server.api_errors import ApiError
from twofold.server.bridge import Answer
from twofold.server.connections import PROBE_KEY
from twofold.server.formats import AnswerFormat
from twofold.server.metrics import RequestTimer
from twofold.types import Chunk, Usage


class AnswerResponse(Response):
    """Runs the sending and a watch on the connection side by side; whichever ends first ends both.

    Whatever happens (complete, hung up, server stopping) the answer is closed, so its place in the engine is
    free.
    """

    def __init__(self, answer: Answer, form: AnswerFormat, timer: RequestTimer) -> None:
        super().__init__()
        self.answer = answer
        self.form = form
        self.timer = timer

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
            self.timer.end()
        if delivery_done:
            delivery.result()

    async def batches(self) -> AsyncIterator[list[Chunk]]:
        """The answer's chunks, timed; raises ApiError when the engine gave it up."""
        async for batch in self.answer.batches():
            self.timer.saw(batch)
            last = batch[-1]
            if last.finish_reason not in ("error", "cancelled"):
                yield batch
                continue
            # What was computed before the failure still belongs to the client.
            yield [*batch[:-1], dataclasses.replace(last, finish_reason=None)]
            raise _given_up(last)


class StreamedAnswer(AnswerResponse):
    """Server-sent events, one per chunk, then [DONE]."""

    async def deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A comment, which clients of event streams read over.
        scope[PROBE_KEY] = b":\n\n"
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            # nginx would otherwise hold events back.
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        first = self.form.first_event()
        if first:
            await _send_part(send, first)
        try:
            async for batch in self.batches():
                await _send_part(send, b"".join(self._events(batch)))
        except ApiError as error:
            await _send_part(send, error.event())
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _events(self, batch: list[Chunk]) -> list[bytes]:
        events: list[bytes] = []
        for chunk in batch:
            if chunk.text:
                events.append(self.form.delta_event(chunk.text, None))
            if chunk.finish_reason is not None:
                events.append(self.form.delta_event("", chunk.finish_reason, chunk.routed_experts))
                if chunk.usage is not None:
                    events.append(self.form.usage_event(chunk.usage))
        return events


class WholeAnswer(AnswerResponse):
    """One JSON body when everything is there; an error keeps its HTTP code."""

    async def deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts: list[str] = []
        last = Chunk("", ())
        try:
            async for batch in self.batches():
                texts.extend(chunk.text for chunk in batch)
                last = batch[-1]
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        usage = last.usage or Usage(0, 0)
        body = self.form.whole("".join(texts), last.finish_reason or "stop", usage, last.routed_experts)
        await JSONResponse(body)(scope, receive, send)


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
    await send({"type": "http.response.body", "body": body, "more_body": True})
