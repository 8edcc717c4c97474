"""From the HTTP loop to the engine's thread and back.

Down: one hop to a worker thread renders the template, tokenises and submits, so that a long prompt never
blocks the loop. Up: the engine calls `on_chunk` on its own thread, which leaves the chunk for the loop and
returns at once; after the step the loop is woken once for all of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

from twofold.api.constraints import CompiledConstraint, Constraint
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.server.api_errors import CONTEXT_LENGTH, ApiError, too_long
from twofold.server.bounded_tokenizer import TooManyTokensError
from twofold.server.prompts import Prompt
from twofold.server.protocol import ServingEngine


class Crossing:
    """From the engine's thread to the event loop: all that a step gave its requests crosses at one wake-up.

    A wake-up is a system call on the engine's thread, and lets the loop contend with it for the interpreter.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._woken = False

    def post(self, receive: Callable[[Any], None], item: object) -> None:
        """Have `receive(item)` called on the loop, after the next `wake`. Called on the engine's thread."""
        self._pending.append((receive, item))

    def wake(self) -> None:
        """What was posted may cross. Called on the engine's thread, once for a step."""
        # Read behind the appends: who finds it set has appended before the loop clears it, and then looks.
        if self._woken or not self._pending:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop is closed: the process is ending and nobody reads.
            self._pending.clear()

    def _deliver(self) -> None:
        self._woken = False
        pending = self._pending
        while pending:
            receive, item = pending.popleft()
            receive(item)


class AnswerStream:
    """The chunks of one HTTP request's answers as they arrive. Close it when nobody reads any more: that frees its
    places.

    Each of its `num_answers` answers is a request to the engine; chunks come with the answer's index.
    """

    def __init__(
        self,
        engine: ServingEngine,
        crossing: Crossing,
        request_id: str,
        num_answers: int = 1,
        on_close: Callable[[AnswerStream], None] = lambda answer: None,
    ) -> None:
        self._engine = engine
        self._on_close = on_close
        self.crossing = crossing
        self._arrived: list[tuple[int, Chunk]] = []
        self._reader: asyncio.Future[None] | None = None
        self._unfinished = set(range(num_answers))
        self.request_id = request_id
        self.engine_ids = (
            [request_id] if num_answers == 1 else [f"{request_id}-{index}" for index in range(num_answers)]
        )
        """What the engine calls each answer."""

    def put(self, index: int, chunk: Chunk) -> None:
        """Called on the engine's thread; the chunk crosses when the step is over."""
        self.crossing.post(self._receive, (index, chunk))

    def _receive(self, item: tuple[int, Chunk]) -> None:
        self._arrived.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def batches(self) -> AsyncIterator[list[tuple[int, Chunk]]]:
        """Every chunk, those of one answer in order; what arrived together comes together. Ends after the last."""
        while self._unfinished:
            if not self._arrived:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            batch, self._arrived = self._arrived, []
            self._unfinished -= {index for index, chunk in batch if chunk.finish_reason is not None}
            if not self._unfinished:
                # Before the client can know that its answer is complete, so that nobody counts it as running.
                self._on_close(self)
            yield batch

    def cancel(self) -> None:
        """Tell the engine to give up what is not complete; the last chunks still come."""
        for index in sorted(self._unfinished):
            self._engine.cancel(self.engine_ids[index])

    def close(self) -> None:
        """Cancel, and read no more. May be called twice."""
        self._on_close(self)
        self.cancel()
        self._unfinished.clear()


async def submit(
    engine: ServingEngine,
    answer: AnswerStream,
    workers: Executor,
    compilers: Executor,
    *,
    tokenise: Callable[[], list[Prompt]],
    sampling_for: Callable[[int], SamplingParams],
    model: str,
    endpoint: str,
    constraint_of: Callable[[Prompt], Constraint | None] = lambda prompt: None,
    return_routed_experts: bool = False,
    shown_tokens: frozenset[int] = frozenset(),
    cache_salt: str = "",
    priority: int = 0,
) -> list[Prompt]:
    """Tokenise on a worker thread and hand the requests to the engine: all of them, or none.

    Args:
        tokenise: renders and encodes the prompts; may raise RequestError. Each gets the same number of answers, of
            which answer i draws with the seed plus i.
        sampling_for: the sampling parameters, given the tokens left for the answer.
        constraint_of: what every answer must match, given the first prompt. Compiled before anything is submitted, on
            threads of its own, as a large one takes seconds.

    Returns the prompts.

    Raises:
        RequestError, CapacityError: from the engine, of a constraint, too; what was submitted before it is cancelled.
        ApiError: a prompt does not fit into the context.
    """

    def work() -> tuple[list[Prompt], Constraint | None]:
        try:
            prompts = tokenise()
        except TooManyTokensError as error:
            raise _too_many(f"more than {error.more_than}", engine.max_context, endpoint) from None
        constraint = constraint_of(prompts[0])
        if constraint is None:
            hand_over(prompts, None)
        return prompts, constraint

    def hand_over(prompts: list[Prompt], constraint: CompiledConstraint | None) -> None:
        samplings = [_fitting(prompt, engine.max_context, sampling_for, endpoint) for prompt in prompts]
        per_prompt = len(answer.engine_ids) // len(prompts)
        taken: list[str] = []
        try:
            for index, engine_id in enumerate(answer.engine_ids):
                prompt = prompts[index // per_prompt]
                engine.submit(
                    GenerationRequest(
                        prompt_token_ids=prompt.token_ids,
                        sampling=_seeded(samplings[index // per_prompt], index % per_prompt),
                        on_chunk=partial(answer.put, index),
                        request_id=engine_id,
                        model=model,
                        endpoint=endpoint,
                        constraint=constraint,
                        return_routed_experts=return_routed_experts,
                        shown_tokens=shown_tokens,
                        cache_salt=cache_salt,
                        priority=priority,
                        turn_ends=prompt.turn_ends,
                        after_step=answer.crossing.wake,
                    )
                )
                taken.append(engine_id)
        except BaseException:
            for engine_id in taken:
                engine.cancel(engine_id)
            raise

    async def submitted() -> list[Prompt]:
        loop = asyncio.get_running_loop()
        prompts, constraint = await loop.run_in_executor(workers, work)
        if constraint is not None:
            compiled = await loop.run_in_executor(compilers, engine.compile, constraint)
            await loop.run_in_executor(workers, hand_over, prompts, compiled)
        return prompts

    submission = asyncio.ensure_future(submitted())
    try:
        return await asyncio.shield(submission)
    except asyncio.CancelledError:
        # The worker cannot be stopped half-way: cancel what it submits, when it has.
        submission.add_done_callback(
            lambda done: None if done.cancelled() or done.exception() else answer.close()
        )
        raise


def _fitting(
    prompt: Prompt, max_context: int, sampling_for: Callable[[int], SamplingParams], endpoint: str
) -> SamplingParams:
    """The prompt's sampling parameters. ApiError when the context has no room for prompt and answer."""
    room = max_context - len(prompt.token_ids)
    if room < 1:
        raise _too_many(str(len(prompt.token_ids)), max_context, endpoint)
    return sampling_for(room)


def _too_many(num_tokens: str, max_context: int, endpoint: str) -> ApiError:
    param = "messages" if endpoint == "chat.completions" else "prompt"
    return ApiError(400, too_long(num_tokens, max_context), param=param, code=CONTEXT_LENGTH)


def _seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """Of answer `index` to one prompt; the first is what the request would have got alone."""
    if sampling.seed is None or index == 0:
        return sampling
    return dataclasses.replace(sampling, seed=sampling.seed + index)
