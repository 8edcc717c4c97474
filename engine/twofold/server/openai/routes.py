"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import Callable, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from twofold.api.constraints import Constraint
from twofold.api.types import SamplingParams
from twofold.server.bridge.crossing import AnswerStream, Bounded, submit, unbounded
from twofold.server.bridge.protocol import Prompt
from twofold.server.bridge.request_body import parse_body
from twofold.server.bridge.state import ServerState
from twofold.server.http.openapi import answers, body_of
from twofold.server.openai.answer_schemas import ChatCompletion, TextCompletion
from twofold.server.openai.answers import StreamedAnswer, WholeAnswer
from twofold.server.openai.chat_format import ChatFormat
from twofold.server.openai.chat_reading import ChatReading
from twofold.server.openai.formats import AnswerFormat, CompletionFormat
from twofold.server.openai.prompts import (
    bad_word_sequences,
    chat_prompts,
    completion_prompts,
    continuing,
)
from twofold.server.openai.schemas import ChatRequest, CompletionRequest, SamplingFields
from twofold.server.openai.stream_schemas import ChatChunk, TextChunk, events_of
from twofold.server.openai.thinking_budget import bounded_thinking


def router(state: ServerState) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.post(
        "/chat/completions",
        openapi_extra=body_of(ChatRequest),
        responses=answers(ChatCompletion, stream=events_of(ChatChunk)),
    )
    async def chat_completions(request: Request) -> Response:
        return await answer_chat(state, await parse_body(request, ChatRequest, state), ChatFormat)

    @routes.post(
        "/completions",
        openapi_extra=body_of(CompletionRequest),
        responses=answers(TextCompletion, stream=events_of(TextChunk)),
    )
    async def completions(request: Request) -> Response:
        body = await parse_body(request, CompletionRequest, state)
        return await answer_completion(state, body, CompletionFormat)

    return routes


async def answer_chat(
    state: ServerState,
    body: ChatRequest,
    make_format: Callable[..., ChatFormat],
    *,
    context: Sequence[int] = (),
) -> Response:
    """Answer a conversation, in any API's format; `context`: tokens placed before it."""
    tokenizer = state.tokenizer
    marks = state.chat_marks
    reading = ChatReading.of(body, marks, tokenizer)

    def tokenise() -> list[Prompt]:
        # Models without records can resume a conversation at any position.
        with_turn_ends = state.engine.stats().num_records > 0
        kept = state.kept_tokens
        prompts = chat_prompts(body, tokenizer, marks, with_turn_ends=with_turn_ends, kept=kept)
        return [continuing(context, prompt, tokenizer) for prompt in prompts] if context else prompts

    return await _answer(
        state,
        body,
        tokenise=tokenise,
        num_prompts=1,
        prefix="chatcmpl",
        endpoint="chat.completions",
        make_format=functools.partial(make_format, reading=reading),
        constraint_of=functools.partial(reading.constraint, body, marks, tokenizer),
        bounded=functools.partial(
            bounded_thinking, body.thinking_token_budget, marks, tokenizer, reading.tools
        ),
        shown_tokens=reading.shown_tokens,
        end_tokens=reading.end_tokens,
    )


async def answer_completion(
    state: ServerState, body: CompletionRequest, make_format: type[AnswerFormat]
) -> Response:
    """Complete a prompt, in any API's format."""
    tokenizer = state.tokenizer
    return await _answer(
        state,
        body,
        tokenise=lambda: completion_prompts(body, tokenizer),
        num_prompts=len(body.prompts),
        prefix="cmpl",
        endpoint="completions",
        make_format=make_format,
        constraint_of=lambda prompt: body.constraint,
    )


async def _answer(
    state: ServerState,
    body: SamplingFields,
    *,
    tokenise: Callable[[], list[Prompt]],
    num_prompts: int,
    prefix: str,
    endpoint: str,
    make_format: Callable[..., AnswerFormat],
    constraint_of: Callable[[Prompt], Constraint | None],
    bounded: Bounded = unbounded,
    shown_tokens: frozenset[int] = frozenset(),
    end_tokens: tuple[int, ...] = (),
) -> Response:
    state.check_model(body.model)
    engine = state.engine
    per_prompt = body.num_candidates
    timers = [timer for _ in range(num_prompts) for timer in state.metrics.begin(per_prompt)]
    request_id = f"{prefix}-{uuid.uuid4().hex}"
    answer = AnswerStream(engine, state.crossing, request_id, len(timers), on_close=state.answers.discard)
    bad_words = functools.cache(lambda: bad_word_sequences(body.bad_words or (), engine.tokenizer))

    def sampling_for(room: int) -> SamplingParams:
        sampling = body.sampling(state.sampling_defaults, room)
        ends = sampling.stop_token_ids
        if not sampling.ignore_eos:
            ends = tuple(dict.fromkeys((*ends, *end_tokens)))
        return dataclasses.replace(sampling, bad_words=bad_words(), stop_token_ids=ends)

    prompts = await submit(
        engine,
        answer,
        state.workers,
        state.compilers,
        counters=state.counters,
        tokenise=tokenise,
        sampling_for=sampling_for,
        constraint_of=constraint_of,
        bounded=bounded,
        return_routed_experts=bool(body.return_routed_experts),
        shown_tokens=shown_tokens,
        model=state.model_name,
        endpoint=endpoint,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
    )
    state.answers.add(answer)
    form = make_format(request_id, state.model_name, body, prompts, engine.tokenizer)
    respond = StreamedAnswer if body.stream else WholeAnswer
    return respond(answer, form, timers)
