"""POST /tokenize and /detokenize, under vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from twofold.api.errors import RequestError
from twofold.server.bridge.models.protocol import ServingTokenizer
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.request_body import parse_body
from twofold.server.http.openapi import answers, body_of
from twofold.server.openai.answer_schemas import Detokenized, Tokenized
from twofold.server.openai.chat_reading import ChatReading
from twofold.server.openai.logprobs import TokenNames
from twofold.server.openai.message_pictures import request_pictures
from twofold.server.openai.prompts import chat_prompts
from twofold.server.openai.schemas import ChatRequest
from twofold.server.openai.tokenize_schemas import (
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
        async with state.using(body.model) as model:
            tokenizer, max_context = model.tokenizer, model.engine.max_context
            if isinstance(body, TokenizeChatRequest):
                chat_ids = await _chat_tokens(model, body, "messages")
                tokens, param = lambda: chat_ids, "messages"
            else:
                tokens, param = partial(_text_tokens, body, tokenizer), "prompt"
            return await _answer(state, lambda: _tokenized(body, tokens, tokenizer, max_context), param)

    @routes.post("/detokenize", openapi_extra=body_of(DetokenizeRequest), responses=answers(Detokenized))
    async def detokenize(request: Request) -> Response:
        body = await parse_body(request, DetokenizeRequest, state)
        async with state.using(body.model) as model:
            tokenizer = model.tokenizer
            return await _answer(state, lambda: _detokenized(body.tokens, tokenizer), "tokens")

    return routes


async def num_prompt_tokens(model: ServedModel, chat: ChatRequest, param: str) -> int:
    """Number of tokens of a conversation's prompt. param: the field that holds it, for errors. Raises RequestError for
    tools whose calls cannot be parsed."""
    ChatReading.of(chat, model.chat_marks, model.tokenizer)
    return len(await _chat_tokens(model, chat, param))


async def _chat_tokens(
    model: ServedModel, chat: ChatRequest | TokenizeChatRequest, param: str
) -> Sequence[int]:
    threads = model.server.threads
    pictures = request_pictures(chat.messages, model)
    if pictures is not None:
        await pictures.encode(threads)
    prompts = partial(
        chat_prompts,
        chat,
        model.tokenizer,
        model.chat_marks,
        cache=model.token_cache,
        max_context=model.engine.max_context,
        pictures=pictures,
    )
    made = await threads.tokenise(prompts, param=param)
    return (made if pictures is None else await pictures.placed(made, threads))[0].token_ids


async def _answer(state: ServerState, work: Callable[[], dict[str, Any]], param: str) -> Response:
    """Run `work` and serialise its result on a tokeniser thread, as it may be long. ApiError 400 for a text with more
    than twice the context's tokens."""

    def written() -> bytes:
        return json.dumps(work(), ensure_ascii=False).encode(errors="replace")

    content = await state.threads.tokenise(written, param=param)
    return Response(content, media_type="application/json")


def _text_tokens(body: TokenizeTextRequest, tokenizer: ServingTokenizer) -> Sequence[int]:
    return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)


def _tokenized(
    body: TokenizeTextRequest | TokenizeChatRequest,
    tokens: Callable[[], Sequence[int]],
    tokenizer: ServingTokenizer,
    max_context: int,
) -> dict[str, Any]:
    """The answer in vLLM's format."""
    token_ids, names = tokens(), TokenNames(tokenizer)
    return {
        "count": len(token_ids),
        "max_model_len": max_context,
        "tokens": list(token_ids),
        "token_strs": [names.name(token_id) for token_id in token_ids] if body.return_token_strs else None,
    }


def _detokenized(token_ids: Sequence[int], tokenizer: ServingTokenizer) -> dict[str, Any]:
    worst = max(token_ids, default=0)
    if worst >= tokenizer.vocab_size:
        raise RequestError(
            f"token id {worst} is outside the vocabulary of {tokenizer.vocab_size}", param="tokens"
        )
    return {"prompt": tokenizer.decode(token_ids, skip_special_tokens=False)}
