"""Anthropic's Messages API, translated to the requests of /v1/chat/completions: what a request asks for is refused or
done exactly as there."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from twofold.server.anthropic_answers import COUNTED, MESSAGES
from twofold.server.anthropic_errors import MESSAGES_PATH
from twofold.server.anthropic_format import AnthropicMessage
from twofold.server.anthropic_prompts import chat_fields
from twofold.server.anthropic_schemas import CountTokensRequest, MessagesChat, MessagesRequest
from twofold.server.api_errors import CONTEXT_LENGTH, ApiError, too_long
from twofold.server.bounded_tokenizer import TooManyTokensError
from twofold.server.chat_reading import ChatReading
from twofold.server.completions import answer_chat
from twofold.server.openapi import body_of
from twofold.server.prompts import chat_prompts
from twofold.server.request_body import parse_body, translated
from twofold.server.state import ServerState


def router(state: ServerState) -> APIRouter:
    routes = APIRouter(prefix=MESSAGES_PATH)

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
        return await answer_chat(state, _translated(state, body, **fields), AnthropicMessage)

    @routes.post("/count_tokens", openapi_extra=body_of(CountTokensRequest), responses=COUNTED)
    async def count_tokens(request: Request) -> Response:
        body = await parse_body(request, CountTokensRequest, state)
        state.check_model(body.model)
        asked = _translated(state, body)
        tokenizer, marks = state.tokenizer, state.chat_marks
        ChatReading.of(asked, marks, tokenizer)  # refuses tools that could not be read

        def count() -> int:
            return len(chat_prompts(asked, tokenizer, marks, kept=state.kept_tokens)[0].token_ids)

        try:
            number = await asyncio.get_running_loop().run_in_executor(state.workers, count)
        except TooManyTokensError as error:
            message = too_long(f"more than {error.more_than}", state.engine.max_context)
            raise ApiError(400, message, param="messages", code=CONTEXT_LENGTH) from None
        return JSONResponse({"input_tokens": number})

    return routes


def _translated(state: ServerState, body: CountTokensRequest, **fields: Any) -> MessagesChat:
    return translated(MessagesChat, chat_fields(body, state.tokenizer) | fields, state)
