"""Requests from the HTTP loop to the engine's thread, and answers back.

Down: one worker-thread task renders the template, tokenises and submits, so that a long prompt never blocks the
loop. Up: the engine calls `on_chunk` on its own thread, which queues the chunk for the loop and returns at once. After
the step the loop is woken once for all chunks.
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
from twofold.server.bridge.bounded_tokenizer import tokenising
from twofold.server.bridge.protocol import Prompt, ServingEngine
from twofold.server.http.errors import CONTEXT_LENGTH, ApiError, too_long

Bounded = Callable[[Prompt, CompiledConstraint | None, int | None], CompiledConstraint | None]
"""Adds the thinking budget to a prompt's constraint, given the most tokens of the answer."""


def unbounded(
    prompt: Prompt, constraint: CompiledConstraint | None, max_tokens: int | None
) -> CompiledConstraint | None:
    """Return the constraint unchanged: the thinking has no budget."""
    return constraint


class Crossing:
    """Queue from the engine's thread to the event loop: all results of a step cross with one wake-up.

    A wake-up is a system call on the engine's thread, and the loop then contends with it for the interpreter.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._woken = False

    def post(self, receive: Callable[[Any], None], item: object) -> None:
        """Queue `receive(item)` for the loop; it runs after the next `wake`. Called on the engine's thread."""
        self._pending.append((receive, item))

    def wake(self) -> None:
        """Deliver the queued items on the loop. Called on the engine's thread, once per step."""
        # Read after the appends: if the flag is set, the loop has yet to clear it, and it drains the queue after that.
        if self._woken or not self._pending:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop is closed: the process is ending and there is no reader left.
            self._pending.clear()

    def _deliver(self) -> None:
        self._woken = False
        pending = self._pending
        while pending:
            receive, item = pending.popleft()
            receive(item)


class AnswerStream:
    """The chunks of one HTTP request's answers, as they arrive. Close it when its reader stops: that frees its places.

    Each of its `num_answers` answers is an engine request; each chunk comes with the answer's index.
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
        """Engine request id of each answer."""

    def put(self, index: int, chunk: Chunk) -> None:
        """Queue a chunk, on the engine's thread; it crosses at the end of the step."""
        self.crossing.post(self._receive, (index, chunk))

    def _receive(self, item: tuple[int, Chunk]) -> None:
        self._arrived.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def batches(self) -> AsyncIterator[list[tuple[int, Chunk]]]:
        """Yield all chunks, in order per answer; chunks that arrived together form one batch. Ends after the last
        chunk."""
        while self._unfinished:
            if not self._arrived:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            batch, self._arrived = self._arrived, []
            self._unfinished -= {index for index, chunk in batch if chunk.finish_reason is not None}
            if not self._unfinished:
                # Before the client can see that its answer is complete, so that a finished request never counts as
                # running.
                self._on_close(self)
            yield batch

    def cancel(self) -> None:
        """Cancel the incomplete answers in the engine; their last chunks still arrive."""
        for index in sorted(self._unfinished):
            self._engine.cancel(self.engine_ids[index])

    def close(self) -> None:
        """Cancel and stop reading. May be called twice."""
        self._on_close(self)
        self.cancel()
        self._unfinished.clear()


async def submit(
    engine: ServingEngine,
    answer: AnswerStream,
    workers: Executor,
    compilers: Executor,
    *,
    counters: Executor,
    tokenise: Callable[[], list[Prompt]],
    sampling_for: Callable[[int], SamplingParams],
    model: str,
    endpoint: str,
    constraint_of: Callable[[Prompt], Constraint | None] = lambda prompt: None,
    bounded: Bounded = unbounded,
    return_routed_experts: bool = False,
    shown_tokens: frozenset[int] = frozenset(),
    cache_salt: str = "",
    priority: int = 0,
) -> list[Prompt]:
    """Tokenise on a worker thread and submit the requests to the engine: all of them, or none.

    Args:
        counters: threads that count the tokens of a prompt that exceeds the context.
        tokenise: renders and encodes the prompts; may raise RequestError. Each prompt gets the same number of answers;
            answer i draws with the seed plus i.
        sampling_for: the sampling parameters, given the tokens left for the answer.
        constraint_of: the constraint on every answer, given the first prompt. It is compiled before any request is
            submitted, on its own threads, because a large one takes seconds.
        bounded: adds the thinking budget to the constraint, given the most tokens of the answer.

    Returns the prompts.

    Raises:
        RequestError, CapacityError: from the engine, also for a constraint; requests already submitted are cancelled.
        ApiError: a prompt does not fit into the context.
    """

    def work() -> tuple[list[Prompt], Constraint | None]:
        prompts = tokenise()
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
                prompt, sampling = prompts[index // per_prompt], samplings[index // per_prompt]
                engine.submit(
                    GenerationRequest(
                        prompt_token_ids=prompt.token_ids,
                        sampling=_seeded(sampling, index % per_prompt),
                        on_chunk=partial(answer.put, index),
                        request_id=engine_id,
                        model=model,
                        endpoint=endpoint,
                        constraint=bounded(prompt, constraint, sampling.max_tokens),
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
        prompts, constraint = await tokenising(work, workers, counters, param=_prompt_field(endpoint))
        if constraint is not None:
            compiled = await loop.run_in_executor(compilers, engine.compile, constraint)
            await loop.run_in_executor(workers, hand_over, prompts, compiled)
        return prompts

    submission = asyncio.ensure_future(submitted())
    try:
        return await asyncio.shield(submission)
    except asyncio.CancelledError:
        # The worker cannot be interrupted: cancel its requests once it has submitted them.
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
        message = too_long(len(prompt.token_ids), max_context)
        raise ApiError(400, message, param=_prompt_field(endpoint), code=CONTEXT_LENGTH)
    return sampling_for(room)


def _prompt_field(endpoint: str) -> str:
    return "messages" if endpoint == "chat.completions" else "prompt"


def _seeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """Sampling parameters of answer `index` to one prompt; answer 0 equals that of a request with n = 1."""
    if sampling.seed is None or index == 0:
        return sampling
    return dataclasses.replace(sampling, seed=sampling.seed + index)
