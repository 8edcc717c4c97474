"""POST /tokenize and /detokenize, by vLLM's names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from twofold.api.errors import RequestError
from twofold.chat.marks import ChatMarks
from twofold.server.answer_schemas import Detokenized, Tokenized
from twofold.server.api_errors import CONTEXT_LENGTH, ApiError, too_long
from twofold.server.bounded_tokenizer import BoundedTokenizer, TooManyTokensError
from twofold.server.logprobs import TokenNames
from twofold.server.openapi import answers, body_of
from twofold.server.prompts import chat_prompts
from twofold.server.request_body import parse_body
from twofold.server.state import ServerState
from twofold.server.tokenize_schemas import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    TokenizeTextRequest,
)


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize", openapi_extra=body_of(TokenizeRequest), responses=answers(Tokenized))
    async def tokenize(request: Request) -> Response:
        body = (await parse_body(request, TokenizeRequest, state)).root
        state.check_model(body.model)
        tokenizer, max_context = state.tokenizer, state.engine.max_context
        marks = state.chat_marks
        return await _answer(state, lambda: _tokenized(body, tokenizer, marks, max_context))

    @routes.post("/detokenize", openapi_extra=body_of(DetokenizeRequest), responses=answers(Detokenized))
    async def detokenize(request: Request) -> Response:
        body = await parse_body(request, DetokenizeRequest, state)
        state.check_model(body.model)
        tokenizer = state.tokenizer
        return await _answer(state, lambda: _detokenized(body.tokens, tokenizer))

    return routes


async def _answer(state: ServerState, work: Callable[[], dict[str, Any]]) -> Response:
    """What `work` returns, made and written as JSON on a thread that tokenises: it may be long."""
    content = await asyncio.get_running_loop().run_in_executor(
        state.workers, lambda: json.dumps(work(), ensure_ascii=False).encode(errors="replace")
    )
    return Response(content, media_type="application/json")


def _tokenized(
    body: TokenizeTextRequest | TokenizeChatRequest,
    tokenizer: BoundedTokenizer,
    marks: ChatMarks,
    max_context: int,
) -> dict[str, Any]:
    """vLLM's answer. ApiError 400 for a text of more than twice the context's tokens, which nobody tokenises whole."""
    try:
        if isinstance(body, TokenizeChatRequest):
            token_ids: Sequence[int] = chat_prompts(body, tokenizer, marks)[0].token_ids
        else:
            token_ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    except TooManyTokensError as error:
        param = "messages" if isinstance(body, TokenizeChatRequest) else "prompt"
        message = too_long(f"more than {error.more_than}", max_context)
        raise ApiError(400, message, param=param, code=CONTEXT_LENGTH) from None
    names = TokenNames(tokenizer)
    return {
        "count": len(token_ids),
        "max_model_len": max_context,
        "tokens": list(token_ids),
        "token_strs": [names.name(token_id) for token_id in token_ids] if body.return_token_strs else None,
    }


def _detokenized(token_ids: Sequence[int], tokenizer: BoundedTokenizer) -> dict[str, Any]:
    worst = max(token_ids, default=0)
    if worst >= tokenizer.vocab_size:
        raise RequestError(
            f"token id {worst} is outside the vocabulary of {tokenizer.vocab_size}", param="tokens"
        )
    return {"prompt": tokenizer.decode(token_ids, skip_special_tokens=False)}
