"""Delivers an answer while its client is connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twofold.api.types import Chunk
from twofold.server.bridge.models.crossing import AnswerStream
from twofold.server.bridge.observe.metrics import RequestTimer
from twofold.server.http.errors import ApiError, unavailable


class ConnectedAnswer(Response):
    """Sends the answer and watches the connection concurrently; whichever ends first ends both.

    The answer is closed in every case (complete, disconnected, server stopping), so its place in the engine is freed.
    """

    def __init__(self, answer: AnswerStream, timers: Sequence[RequestTimer]) -> None:
        """`timers`: one per answer."""
        super().__init__()
        self.answer = answer
        self.timers = timers

    async def deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("each kind of answer delivers in its own way")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(self.deliver(scope, receive, send), receive)
        finally:
            self.answer.close()
            for timer in self.timers:
                timer.end()

    async def batches(self) -> AsyncIterator[list[tuple[int, Chunk]]]:
        """The answers' chunks, with timing; raises ApiError when the engine aborted one of them."""
        async for batch in self.answer.batches():
            delivered: list[tuple[int, Chunk]] = []
            aborted: Chunk | None = None
            for index, chunk in batch:
                self.timers[index].observe([chunk])
                if chunk.finish_reason in ("error", "cancelled"):
                    aborted = aborted or chunk
                    # Chunks computed before the failure still go to the client.
                    delivered.append((index, chunk._replace(finish_reason=None)))
                else:
                    delivered.append((index, chunk))
            yield delivered
            if aborted is not None:
                raise _abort_error(aborted)


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do the work and watch the connection concurrently; whichever ends first ends both."""
    delivery = asyncio.create_task(work)
    watch = asyncio.create_task(_until_disconnected(receive))
    try:
        await asyncio.wait({delivery, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        delivery_done = delivery.done()
        for task in (delivery, watch):
            task.cancel()
        await asyncio.gather(delivery, watch, return_exceptions=True)
    if delivery_done:
        delivery.result()


def _abort_error(last: Chunk) -> ApiError:
    if last.finish_reason == "error":
        message = last.error or "the engine failed while it computed this answer"
        return ApiError(500, message, code="engine_error")
    message = "the server is shutting down and cancelled this answer; send the request again later"
    return unavailable(message, "server_draining", 5)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
