"""From the HTTP loop to the engine's thread and back.

Down: one hop to a worker thread renders the template, tokenises and submits, so that a long prompt never
blocks the loop. Up: the engine calls `on_chunk` on its own thread, which posts the chunk to the loop and
returns at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor

from twofold.server.api_errors import CONTEXT_LENGTH, ApiError, too_long
from twofold.server.bounded_tokenizer import TooManyTokensError
from twofold.server.protocol import ServingEngine
from twofold.types import Chunk, GenerationRequest, SamplingParams


class Answer:
    """One request's chunks as they arrive. Close it when nobody reads any more: that frees its place."""

    def __init__(
        self, engine: ServingEngine, request_id: str, on_close: Callable[[Answer], None] = lambda answer: None
    ) -> None:
        self._engine = engine
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self._finished = False
        self.request_id = request_id

    def put(self, chunk: Chunk) -> None:
        """Called on the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)
        except RuntimeError:
            # The loop is closed: the process is ending and nobody reads.
            return

    async def batches(self) -> AsyncIterator[list[Chunk]]:
        """Every chunk in order; those that arrived together come together. Ends after the last."""
        while not self._finished:
            batch = [await self._chunks.get()]
            while not self._chunks.empty():
                batch.append(self._chunks.get_nowait())
            self._finished = batch[-1].finish_reason is not None
            if self._finished:
                # Before the client can know that its answer is complete, so that nobody counts it as running.
                self._on_close(self)
            yield batch

    def close(self) -> None:
        """Tell the engine to stop, unless the answer is complete. May be called twice."""
        self._on_close(self)
        if not self._finished:
            self._finished = True
            self._engine.cancel(self.request_id)


async def submit(
    engine: ServingEngine,
    answer: Answer,
    workers: Executor,
    *,
    tokenise: Callable[[], list[int]],
    sampling_for: Callable[[int], SamplingParams],
    model: str,
    endpoint: str,
    return_routed_experts: bool = False,
) -> None:
    """Tokenise on a worker thread and hand the request to the engine.

    Args:
        tokenise: renders and encodes the prompt; may raise RequestError.
        sampling_for: the sampling parameters, given the tokens left for the answer.

    Raises:
        RequestError, CapacityError: from the engine; nothing has started.
        ApiError: the prompt does not fit into the context.
    """

    def too_many(num_tokens: str) -> ApiError:
        param = "messages" if endpoint == "chat.completions" else "prompt"
        message = too_long(num_tokens, engine.max_context)
        return ApiError(400, message, param=param, code=CONTEXT_LENGTH)

    def work() -> None:
        try:
            token_ids = tokenise()
        except TooManyTokensError as error:
            raise too_many(f"more than {error.more_than}") from None
        room = engine.max_context - len(token_ids)
        if room < 1:
            raise too_many(str(len(token_ids)))
        engine.submit(
            GenerationRequest(
                prompt_token_ids=tuple(token_ids),
                sampling=sampling_for(room),
                on_chunk=answer.put,
                request_id=answer.request_id,
                model=model,
                endpoint=endpoint,
                return_routed_experts=return_routed_experts,
            )
        )

    submission = asyncio.get_running_loop().run_in_executor(workers, work)
    try:
        await asyncio.shield(submission)
    except asyncio.CancelledError:
        # The worker cannot be stopped half-way: cancel what it submits, when it has.
        submission.add_done_callback(
            lambda done: None if done.cancelled() or done.exception() else answer.close()
        )
        raise
