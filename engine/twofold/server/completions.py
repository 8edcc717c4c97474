"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from twofold.server.answers import StreamedAnswer, WholeAnswer
from twofold.server.bridge import Answer, submit
from twofold.server.formats import AnswerFormat, ChatFormat, CompletionFormat
from twofold.server.request_body import parse_body
from twofold.server.schemas import ChatRequest, CompletionRequest, SamplingFields
from twofold.server.state import ServerState


def router(state: ServerState) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.post("/chat/completions", openapi_extra=_body_of(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = await parse_body(request, ChatRequest, state)
        tokenizer = state.tokenizer
        messages = [message.for_template() for message in body.messages]
        return await _answer(
            state,
            body,
            tokenise=lambda: tokenizer.encode(tokenizer.apply_chat_template(messages)),
            prefix="chatcmpl",
            endpoint="chat.completions",
            make_format=ChatFormat,
        )

    @routes.post("/completions", openapi_extra=_body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = await parse_body(request, CompletionRequest, state)
        tokenizer = state.tokenizer
        prompt = body.prompt

        def tokenise() -> list[int]:
            return tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt

        return await _answer(
            state,
            body,
            tokenise=tokenise,
            prefix="cmpl",
            endpoint="completions",
            make_format=CompletionFormat,
        )

    return routes


async def _answer(
    state: ServerState,
    body: SamplingFields,
    *,
    tokenise: Callable[[], list[int]],
    prefix: str,
    endpoint: str,
    make_format: type[AnswerFormat],
) -> Response:
    state.check_model(body.model)
    timer = state.metrics.begin()
    answer = Answer(state.engine, f"{prefix}-{uuid.uuid4().hex}", on_close=state.answers.discard)
    await submit(
        state.engine,
        answer,
        state.workers,
        tokenise=tokenise,
        sampling_for=lambda room: body.sampling(state.sampling_defaults, room),
        return_routed_experts=bool(body.return_routed_experts),
        model=state.model_name,
        endpoint=endpoint,
    )
    state.answers.add(answer)
    form = make_format(answer.request_id, state.model_name, usage_wanted=body.wants_usage)
    respond = StreamedAnswer if body.stream else WholeAnswer
    return respond(answer, form, timer)


def _body_of(schema: type[SamplingFields]) -> dict[str, Any]:
    """The request's schema for /openapi.json: bodies are parsed by hand, so FastAPI cannot see it."""
    content = {"application/json": {"schema": schema.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
