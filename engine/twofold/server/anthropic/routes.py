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
from twofold.server.openai.routes import answer_chat
from twofold.server.openai.tokenization import num_prompt_tokens

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
            "generates_nothing": not body.max_tokens,
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
            number = await num_prompt_tokens(model, _translated(model, body), "messages")
        return JSONResponse({"input_tokens": number})

    return routes


def _translated(model: ServedModel, body: CountTokensRequest, **fields: Any) -> MessagesChat:
    return translated(MessagesChat, chat_fields(body, model.tokenizer) | fields, model)
