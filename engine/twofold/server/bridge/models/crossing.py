"""Requests from the HTTP loop to the engine's thread, and answers back.

Down: one worker-thread task renders the template, tokenises and submits, so that a long prompt never blocks the
loop. Up: the engine calls `on_chunk` on its own thread, which queues the chunk for the loop and returns at once. After
the step the loop is woken once for all chunks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from twofold.api.constraints import CompiledConstraint, Constraint
from twofold.api.request_times import RequestTimes
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.server.bridge.models.loop_signal import LoopSignal
from twofold.server.bridge.models.protocol import Prompt, ServingEngine
from twofold.server.bridge.models.request_pictures import RequestPictures
from twofold.server.bridge.models.threads import Threads
from twofold.server.http.errors import CONTEXT_LENGTH, ApiError, too_long


@dataclass(frozen=True)
class RequestPlan:
    """One HTTP request on its way to the engine. All callables but `sampling_for` run on threads."""

    template: GenerationRequest
    """What all its engine requests have in common."""
    tokenise: Callable[[], list[Prompt]]
    """Renders and encodes the prompts; may raise RequestError. Each prompt gets the same number of answers; answer i
    draws with the seed plus i."""
    sampling_for: Callable[[int], SamplingParams]
    """The sampling parameters, given the tokens left for the answer."""
    constraint_of: Callable[[Prompt], Constraint | None]
    """The constraint on every answer, given the first prompt. It is compiled before any request is submitted, on its
    own threads, because a large one takes seconds."""
    bounded: Callable[[Prompt, CompiledConstraint | None, int | None], CompiledConstraint | None] = (
        lambda prompt, constraint, max_tokens: constraint
    )
    """Adds the thinking budget to the constraint, given the most tokens of the answer."""
    times: RequestTimes = field(default_factory=RequestTimes.begin)
    """The request's stopwatch."""
    pictures: RequestPictures | None = None
    """The prompt's pictures; None: it has none."""
    max_prompt_tokens: int | None = None
    """Length to which the prompts are truncated; None: they are not."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that also end an answer, unless it ignores the end of text."""

    @property
    def prompt_field(self) -> str:
        """The request's field with the prompt, for errors."""
        return "messages" if self.template.endpoint == "chat.completions" else "prompt"

    def sampling(self, prompt: Prompt, max_context: int, reason: str) -> SamplingParams:
        """The prompt's sampling parameters. ApiError when the context has no room for prompt and answer.

        reason: what ends the context before the model's own does.
        """
        room = max_context - len(prompt.token_ids)
        if room < 1:
            message = too_long(len(prompt.token_ids), max_context, reason)
            raise ApiError(400, message, param=self.prompt_field, code=CONTEXT_LENGTH)
        sampling = self.sampling_for(room)
        if sampling.ignore_eos:
            return sampling
        ends = dict.fromkeys((*sampling.stop_token_ids, *self.end_tokens))
        return replace(sampling, stop_token_ids=tuple(ends))


class Crossing:
    """Queue from the engine's thread to the event loop: all results of a step cross with one wake-up.

    Create it on the loop.
    """

    def __init__(self) -> None:
        self._signal = LoopSignal(asyncio.get_running_loop(), self._deliver)
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
        self._signal.set()

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
        self.engine = engine
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
            self.engine.cancel(self.engine_ids[index])

    def close(self) -> None:
        """Cancel and stop reading. May be called twice."""
        self._on_close(self)
        self.cancel()
        self._unfinished.clear()


async def submit(plan: RequestPlan, answer: AnswerStream, threads: Threads) -> list[Prompt]:
    """Tokenise on a thread and submit the requests to the engine: all of them, or none.

    Returns the prompts.

    Raises:
        RequestError, CapacityError: from the engine, also for a constraint; requests already submitted are cancelled.
        ApiError: a prompt does not fit into the context.
    """

    def work() -> tuple[list[Prompt], Constraint | None]:
        plan.times.mark("tokenise_wait")
        prompts = plan.tokenise()
        plan.times.mark("tokenise")
        constraint = plan.constraint_of(prompts[0])
        if constraint is None and plan.pictures is None:
            _submit_all(plan, answer, prompts, None)
        return prompts, constraint

    async def submitted() -> list[Prompt]:
        loop = asyncio.get_running_loop()
        pictures, compiled = plan.pictures, None
        if pictures is not None:
            answer.engine.check_room()
            await pictures.encode(threads)
            plan.times.mark("encode")
        prompts, constraint = await threads.tokenise(work, param=plan.prompt_field)
        if pictures is not None:
            prompts = await pictures.placed(prompts, threads, plan.max_prompt_tokens)
            plan.times.mark("encode")
        if constraint is not None:
            compiled = await loop.run_in_executor(threads.compilers, answer.engine.compile, constraint)
        if constraint is not None or pictures is not None:
            submit_all = partial(_submit_all, plan, answer, prompts)
            await loop.run_in_executor(threads.tokenisers, submit_all, compiled)
        return prompts

    submission = asyncio.ensure_future(submitted())
    try:
        return await asyncio.shield(submission)
    except asyncio.CancelledError:
        # The thread cannot be interrupted: cancel its requests once it has submitted them.
        submission.add_done_callback(
            lambda done: None if done.cancelled() or done.exception() else answer.close()
        )
        raise


def _submit_all(
    plan: RequestPlan,
    answer: AnswerStream,
    prompts: Sequence[Prompt],
    constraint: CompiledConstraint | None,
) -> None:
    engine = answer.engine
    if constraint is not None:
        plan.times.mark("compile")
    samplings = [
        plan.sampling(prompt, engine.max_context, engine.info.context_limit_reason) for prompt in prompts
    ]
    per_prompt = len(answer.engine_ids) // len(prompts)
    taken: list[str] = []
    try:
        for index, engine_id in enumerate(answer.engine_ids):
            prompt, sampling = prompts[index // per_prompt], samplings[index // per_prompt]
            # Answer 0 equals that of a request with n = 1.
            seed = None if sampling.seed is None else sampling.seed + index % per_prompt
            engine.submit(
                replace(
                    plan.template,
                    prompt_token_ids=prompt.token_ids,
                    sampling=replace(sampling, seed=seed),
                    on_chunk=partial(answer.put, index),
                    request_id=engine_id,
                    constraint=plan.bounded(prompt, constraint, sampling.max_tokens),
                    turn_ends=prompt.turn_ends,
                    prediction=prompt.prediction,
                    media=prompt.media,
                    after_step=answer.crossing.wake,
                    times=plan.times,
                )
            )
            taken.append(engine_id)
    except BaseException:
        for engine_id in taken:
            engine.cancel(engine_id)
        raise
