"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Scope

from twofold.api.request_times import RequestTimes
from twofold.api.types import GenerationRequest
from twofold.server.bridge.models.crossing import AnswerStream, RequestPlan, submit
from twofold.server.bridge.models.protocol import Prompt, ServingEngine, ServingTokenizer
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.observe.answered import SETTINGS, AnsweredRequest, note_answered
from twofold.server.bridge.requests.request_body import parse_body
from twofold.server.http.arrival import origin_of, prefix_labels_of, times_of
from twofold.server.http.openapi import answers, body_of, events_of
from twofold.server.openai.answer_schemas import ChatChunk, ChatCompletion, TextChunk, TextCompletion
from twofold.server.openai.answers import StreamedAnswer, WholeAnswer
from twofold.server.openai.chat_format import ChatFormat
from twofold.server.openai.chat_reading import ChatReading
from twofold.server.openai.completion_schema import CompletionRequest
from twofold.server.openai.fill_in import fill_end_tokens
from twofold.server.openai.formats import AnswerContext, AnswerFormat, CompletionFormat
from twofold.server.openai.message_pictures import request_pictures
from twofold.server.openai.prompts import (
    bad_word_sequences,
    chat_prompts,
    completion_prompts,
    continuing,
    with_prediction,
)
from twofold.server.openai.schemas import ChatRequest, SamplingFields
from twofold.server.openai.thinking_budget import bounded_thinking

_ID_PREFIXES: Final = {"chat.completions": "chatcmpl", "completions": "cmpl"}
"""Prefix of request ids by endpoint."""


def router(state: ServerState) -> APIRouter:
    routes = APIRouter(prefix="/v1")
    state.computing_paths |= {"/v1/chat/completions", "/v1/completions"}

    @routes.post(
        "/chat/completions",
        openapi_extra=body_of(ChatRequest),
        responses=answers(ChatCompletion, stream=events_of(ChatChunk)),
    )
    async def chat_completions(request: Request) -> Response:
        body = await parse_body(request, ChatRequest, state)
        async with state.using(body.lora_path or body.model, lora=body.lora) as model:
            return await answer_chat(request, model, body, ChatFormat)

    @routes.post(
        "/completions",
        openapi_extra=body_of(CompletionRequest),
        responses=answers(TextCompletion, stream=events_of(TextChunk)),
    )
    async def completions(request: Request) -> Response:
        body = await parse_body(request, CompletionRequest, state)
        async with state.using(body.lora_path or body.model, lora=body.lora) as model:
            return await answer_completion(request, model, body, CompletionFormat)

    return routes


async def answer_chat(
    request: Request,
    model: ServedModel,
    body: ChatRequest,
    make_format: Callable[..., ChatFormat],
    *,
    context: Sequence[int] = (),
) -> Response:
    """Answer a conversation, in any API's format; `context`: tokens placed before it."""
    times = times_of(request.scope)
    tokenizer = _tokenizer(model, body)
    marks = model.chat_marks
    reading = ChatReading.of(body, marks, tokenizer)
    pictures = request_pictures(body.messages, model)

    def tokenise() -> list[Prompt]:
        # Models without records can resume a conversation at any position.
        with_turn_ends = model.engine.stats().num_records > 0
        cache = model.token_cache
        prompts = chat_prompts(
            body,
            tokenizer,
            marks,
            with_turn_ends=with_turn_ends,
            cache=cache,
            max_context=model.engine.max_context,
            pictures=pictures,
            on_rendered=partial(times.mark, "template"),
        )
        prompts = with_prediction(prompts, body, tokenizer, model.engine.max_context)
        return [continuing(context, prompt, tokenizer) for prompt in prompts] if context else prompts

    plan = _plan(model, body, tokenise, times, endpoint="chat.completions")
    plan = replace(
        plan,
        template=replace(plan.template, shown_tokens=reading.shown_tokens),
        pictures=pictures,
        max_prompt_tokens=body.prompt_limit(model.engine.max_context),
        constraint_of=partial(reading.constraint, body, marks, tokenizer),
        bounded=partial(
            bounded_thinking,
            budget=body.thinking_budget,
            marks=marks,
            tokenizer=tokenizer,
            calls=bool(reading.tools),
        ),
        end_tokens=reading.end_tokens,
    )
    return await _answer(model, body, plan, partial(make_format, reading=reading), scope=request.scope)


async def answer_completion(
    request: Request, model: ServedModel, body: CompletionRequest, make_format: type[AnswerFormat]
) -> Response:
    """Complete a prompt, in any API's format."""
    tokenise = partial(completion_prompts, body, _tokenizer(model, body), model.engine.max_context)
    if body.suffix:
        return await fill_gap(request, model, body, make_format, tokenise)
    plan = _plan(model, body, tokenise, times_of(request.scope), endpoint="completions")
    return await _answer(model, body, plan, make_format, scope=request.scope)


async def fill_gap(
    request: Request,
    model: ServedModel,
    body: CompletionRequest,
    make_format: Callable[..., AnswerFormat],
    tokenise: Callable[[], list[Prompt]],
) -> Response:
    """Answer the prompts of `tokenise`, which have the model's marks of a gap, in any API's format."""
    plan = _plan(model, body, tokenise, times_of(request.scope), endpoint="completions")
    plan = replace(plan, end_tokens=fill_end_tokens(model.engine.tokenizer))
    return await _answer(model, body, plan, make_format, scope=request.scope)


def _tokenizer(model: ServedModel, body: SamplingFields) -> ServingTokenizer:
    """The tokenizer that refuses prompts beyond the context, unless they are truncated."""
    return model.tokenizer if body.truncate_prompt_tokens is None else model.engine.tokenizer


def _plan(
    model: ServedModel,
    body: SamplingFields,
    tokenise: Callable[[], list[Prompt]],
    times: RequestTimes,
    *,
    endpoint: str,
) -> RequestPlan:
    """The plan with what both endpoints have in common."""
    bad_words = cache(lambda: bad_word_sequences(body.bad_words or (), model.engine.tokenizer))
    return RequestPlan(
        GenerationRequest(
            model=model.name,
            endpoint=endpoint,
            return_routed_experts=bool(body.return_routed_experts),
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            adapter=model.adapter,
        ),
        tokenise,
        lambda room: replace(body.sampling(model.sampling_defaults, room), bad_words=bad_words()),
        lambda prompt: body.constraint,
        times=times,
    )


def _hit_rate_from_now(engine: ServingEngine) -> Callable[[], float | None]:
    """A function that returns the share of routed experts that were in a slot since this call, of all requests."""
    if not engine.info.num_slots:
        return lambda: None
    before = engine.stats().placement

    def share() -> float | None:
        now = engine.stats().placement
        hits = now.hits - before.hits
        routed = hits + now.cpu_misses - before.cpu_misses + now.fetched - before.fetched
        return hits / routed if routed else None

    return share


async def _answer(
    model: ServedModel,
    body: SamplingFields,
    plan: RequestPlan,
    make_format: Callable[..., AnswerFormat],
    *,
    scope: Scope,
) -> Response:
    engine = model.engine
    timers = [
        timer
        for _ in range(body.num_prompts)
        for timer in model.metrics.begin(body.num_candidates, plan.times)
    ]
    request_id = f"{_ID_PREFIXES[plan.template.endpoint]}-{uuid.uuid4().hex}"
    if model.server.spans is not None or model.server.config.log_requests:
        settings = {name: value for name in SETTINGS if (value := getattr(body, name)) is not None}
        note_answered(
            scope,
            AnsweredRequest(
                request_id,
                plan.template.endpoint,
                model=model.name,
                requested_model=body.model,
                settings=settings,
                timers=timers,
                answers_per_prompt=body.num_candidates,
                expert_hit_rate=(
                    _hit_rate_from_now(engine) if model.server.config.log_requests else lambda: None
                ),
            ),
        )
    template = replace(plan.template, prefix_labels=prefix_labels_of(scope), origin=origin_of(scope))
    plan = replace(plan, template=template)
    answer = AnswerStream(
        engine, model.server.crossing, request_id, len(timers), on_close=model.answer_closed
    )
    model.answers.add(answer)
    try:
        prompts = await submit(plan, answer, model.server.threads)
    except BaseException:
        model.answer_closed(answer)
        raise
    requested = AnswerContext(
        request_id,
        model.name,
        body,
        prompts=prompts,
        tokenizer=engine.tokenizer,
        reasoning_field=model.server.config.reasoning_field,
    )
    respond = StreamedAnswer if body.stream else WholeAnswer
    return respond(answer, make_format(requested), timers)
