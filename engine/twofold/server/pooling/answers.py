"""Runs the inputs of one HTTP request as pooled prompts, a few at a time, and writes its answer.

At most as many of them are in the engine as it runs requests, so that the queue stays open to others. The engine
serves in order of arrival: a new request waits for those few at most.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twofold.api.errors import CapacityError, RequestError, TwofoldError
from twofold.api.pooling import ModelPooling, Pooling
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.server.bridge.models.crossing import AnswerStream
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.observe.metrics import RequestTimer
from twofold.server.bridge.requests.connected import ConnectedAnswer
from twofold.server.http import errors as api_errors
from twofold.server.http.arrival import origin_of, times_of
from twofold.server.http.errors import ApiError, wrong_field
from twofold.server.pooling.inputs import InputTokens
from twofold.server.pooling.schemas import PooledFields

F32 = npt.NDArray[np.float32]
Write = Callable[[list[F32], int], bytes]
"""Writes the answer's JSON of the inputs' vectors, in order, and of their number of tokens."""
Tokenise = Callable[[InputTokens], dict[str, tuple[int, ...]]]
"""Token ids of each input, by its place in the request."""


async def answer_pooled(
    request: Request,
    model: ServedModel,
    body: PooledFields,
    pooling: Pooling,
    tokenise: Tokenise,
    write: Write,
    *,
    endpoint: str,
) -> Response:
    """Pool the inputs of a request and answer with what `write` makes of them; it and `tokenise` run on threads."""
    engine, times = model.engine, times_of(request.scope)
    limit = body.truncate_prompt_tokens
    reader = InputTokens(
        model.tokenizer if limit is None else engine.tokenizer, engine.max_context, truncated_to=limit
    )

    def work() -> dict[str, tuple[int, ...]]:
        times.mark("tokenise_wait")
        found = tokenise(reader)
        times.mark("tokenise")
        return found

    prompts = await model.server.threads.tokenise(work, param="input")
    request_id = f"{endpoint}-{uuid.uuid4().hex}"
    timers = [timer for _ in prompts for timer in model.metrics.begin(1, times)]
    crossing = model.server.crossing
    answer = AnswerStream(engine, crossing, request_id, len(prompts), on_close=model.answer_closed)
    template = GenerationRequest(
        model=model.name,
        endpoint=endpoint,
        sampling=SamplingParams(max_tokens=0),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        adapter=model.adapter,
        after_step=crossing.wake,
        times=times,
        pooling=pooling,
        origin=origin_of(request.scope),
    )
    pooled = PooledAnswer(answer, timers, _Queue(answer, template, prompts), partial(_write, model, write))
    try:
        pooled.queue.submit_some()
    except BaseException:
        answer.close()
        raise
    model.answers.add(answer)
    return pooled


async def _write(model: ServedModel, write: Write, vectors: list[F32], num_tokens: int) -> bytes:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(model.server.threads.tokenisers, write, vectors, num_tokens)


class _Queue:
    """The inputs that are not in the engine yet."""

    def __init__(
        self, answer: AnswerStream, template: GenerationRequest, prompts: dict[str, tuple[int, ...]]
    ) -> None:
        self._answer, self._template = answer, template
        self._waiting = list(enumerate(prompts.items()))[::-1]
        self._most = answer.engine.config.max_num_seqs
        self.num_running = 0

    def submit_some(self) -> None:
        """Fill the places that this request may take. If the engine is full, the next call tries again, unless none
        of these inputs is running.

        Raises:
            ApiError: an input can never be served. CapacityError: none runs and none is taken.
        """
        while self._waiting and self.num_running < self._most:
            index, (where, prompt) = self._waiting[-1]
            try:
                self._answer.engine.submit(self._request(index, prompt))
            except RequestError as error:
                param = error.param if error.param not in ("prompt", None) else where
                raise ApiError(
                    400, f"{where}: {error}" if param == where else str(error), param=param
                ) from None
            except CapacityError as error:
                if self.num_running and not (error.draining or error.asleep):
                    return
                raise
            self._waiting.pop()
            self.num_running += 1

    def _request(self, index: int, prompt: tuple[int, ...]) -> GenerationRequest:
        answer = self._answer
        return replace(
            self._template,
            prompt_token_ids=prompt,
            on_chunk=partial(answer.put, index),
            request_id=answer.engine_ids[index],
        )


class PooledAnswer(ConnectedAnswer):
    """One JSON body once all inputs are pooled; an error keeps its HTTP code."""

    def __init__(
        self, answer: AnswerStream, timers: Sequence[RequestTimer], queue: _Queue, write: Callable[..., Any]
    ) -> None:
        super().__init__(answer, timers)
        self.queue = queue
        self._write = write

    async def deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        last: dict[int, Chunk] = {}
        try:
            async for batch in self.batches():
                ended = {index: chunk for index, chunk in batch if chunk.finish_reason is not None}
                last |= ended
                self.queue.num_running -= len(ended)
                self.queue.submit_some()
        except TwofoldError as error:
            await api_errors.from_twofold(error).response(scope["path"])(scope, receive, send)
            return
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        chunks = [last[index] for index in range(len(self.timers))]
        vectors = [chunk.pooled for chunk in chunks if chunk.pooled is not None]
        num_tokens = sum(chunk.usage.prompt_tokens for chunk in chunks if chunk.usage is not None)
        content = await self._write(vectors, num_tokens)
        await Response(content, media_type="application/json")(scope, receive, send)


def embedding_of(
    model: ModelPooling, *, dimensions: int | None = None, normalise: bool | None = None
) -> Pooling:
    """The model's pooling with a request's wishes. ApiError 400 for a number of dimensions that it does not have."""
    if dimensions is not None and dimensions != model.size:
        _check_dimensions(model, dimensions)
    return Pooling(model.kind, model.normalise if normalise is None else normalise, dimensions)


def _check_dimensions(model: ModelPooling, dimensions: int) -> None:
    if not (model.is_matryoshka or model.dimensions):
        raise wrong_field(
            "dimensions",
            f"{dimensions} was given; this model's vectors have {model.size} elements, and its files do not say that "
            "they may be cut. If they may, start with --pooler-config '{\"is_matryoshka\": true}'",
        )
    if model.dimensions and dimensions not in model.dimensions:
        raise wrong_field(
            "dimensions", f"{dimensions} was given; it takes {', '.join(map(str, model.dimensions))}"
        )
    if dimensions > model.size:
        raise wrong_field(
            "dimensions", f"{dimensions} was given; the model's vectors have {model.size} elements"
        )
