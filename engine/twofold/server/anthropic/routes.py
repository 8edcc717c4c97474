"""Anthropic's Messages API, translated to requests of /v1/chat/completions, with the same refusals and behaviour."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from twofold.server.anthropic.answer_schemas import COUNTED, MESSAGES
from twofold.server.anthropic.errors import anthropic_error
from twofold.server.anthropic.format import AnthropicMessage
from twofold.server.anthropic.prompts import chat_fields
from twofold.server.anthropic.schemas import CountTokensRequest, MessagesChat, MessagesRequest
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.request_body import parse_body, translated
from twofold.server.http.errors import set_error_format
from twofold.server.http.openapi import body_of
from twofold.server.openai.chat_reading import ChatReading
from twofold.server.openai.prompts import chat_prompts
from twofold.server.openai.routes import answer_chat

_PATH: Final = "/v1/messages"

set_error_format(_PATH, anthropic_error)


def router(state: ServerState) -> APIRouter:
    routes = APIRouter(prefix=_PATH)
    state.computing_paths.add(_PATH)

    @routes.post("", openapi_extra=body_of(MessagesRequest), responses=MESSAGES)
    async def messages(request: Request) -> Response:
        body = await parse_body(request, MessagesRequest, state)
        fields = {
            "max_tokens": body.max_tokens or 1,
            "answers_nothing": not body.max_tokens,
            "stop": body.stop_sequences or None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stream": body.stream,
        }
        async with state.using(body.model) as model:
            return await answer_chat(request, model, _translated(model, body, **fields), AnthropicMessage)

    @routes.post("/count_tokens", openapi_extra=body_of(CountTokensRequest), responses=COUNTED)
    async def count_tokens(request: Request) -> Response:
        body = await parse_body(request, CountTokensRequest, state)
        async with state.using(body.model) as model:
            asked = _translated(model, body)
            tokenizer, marks, cache = model.tokenizer, model.chat_marks, model.token_cache
            ChatReading.of(asked, marks, tokenizer)  # refuses tools whose calls cannot be parsed

            def count() -> int:
                return len(chat_prompts(asked, tokenizer, marks, cache=cache)[0].token_ids)

            number = await state.threads.tokenise(count, param="messages")
        return JSONResponse({"input_tokens": number})

    return routes


def _translated(model: ServedModel, body: CountTokensRequest, **fields: Any) -> MessagesChat:
    return translated(MessagesChat, chat_fields(body, model.tokenizer) | fields, model)
