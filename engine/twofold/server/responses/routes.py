"""POST /v1/responses, translated to /v1/chat/completions with the same refusals and behaviour.

Recent responses are kept in memory (`ResponseStore`), so that a request can continue one.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from twofold.api.errors import RequestError
from twofold.api.types import Usage
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.request_body import parse_body, translated
from twofold.server.http import errors as api_errors
from twofold.server.http.errors import CONTEXT_LENGTH, ApiError
from twofold.server.http.openapi import answers, body_of, events_of
from twofold.server.openai.routes import answer_chat
from twofold.server.openai.schemas import ChatRequest
from twofold.server.openai.template_variables import reads_effort
from twofold.server.openai.tokenization import num_prompt_tokens
from twofold.server.responses.answer_schemas import InputTokens, ResponseAnswer, ResponseEvent
from twofold.server.responses.format import (
    EventNumbers,
    ResponseContext,
    ResponsesFormat,
    begin_events,
    failed,
    response_id,
    usage_body,
)
from twofold.server.responses.input import Offer, messages_of, offer_of, tool_choice_of
from twofold.server.responses.schemas import InputTokensRequest, ResponsesRequest
from twofold.server.responses.store import ResponseStore
from twofold.server.responses.stored import add_stored_routes, with_stored_items

_SAME: Final = (
    *(
        "repetition_penalty",
        "ignore_eos",
        "cache_salt",
        "thinking_token_budget",
        "parallel_tool_calls",
        "stream",
    ),
    *("model", "top_logprobs", "chat_template_kwargs"),
)
"""Further fields that are the chat's own."""
_NAMES: Final = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Names of the chat's fields in this API."""
_NOTHING: Final = Usage(0, 0, 0.0, 0.0)


def router(state: ServerState) -> APIRouter:
    routes = APIRouter(prefix="/v1/responses")
    state.computing_paths.add("/v1/responses")
    config = state.config
    store = ResponseStore(config.max_stored_responses, config.max_stored_response_bytes)

    @routes.post(
        "",
        openapi_extra=body_of(ResponsesRequest),
        responses=answers(ResponseAnswer, stream=events_of(ResponseEvent, with_done=False, error=None)),
    )
    async def responses(request: Request) -> Response:
        body = await parse_body(request, ResponsesRequest, state)
        whole = with_stored_items(body, store)
        async with state.using(body.model) as model:
            return await _answer(request, model, whole, _keeping(store, body, whole))

    @routes.post("/input_tokens", openapi_extra=body_of(InputTokensRequest), responses=answers(InputTokens))
    async def input_tokens(request: Request) -> Response:
        body = with_stored_items(await parse_body(request, InputTokensRequest, state), store)
        async with state.using(body.model) as model:
            if not _has_input(body):
                return JSONResponse({"object": "response.input_tokens", "input_tokens": 0})
            chat = _chat(model, body, offer_of(body.all_tools), _effort(model, body))
            number = await num_prompt_tokens(model, chat, "input")
        return JSONResponse({"object": "response.input_tokens", "input_tokens": number})

    add_stored_routes(routes, store)
    return routes


def _keeping(
    store: ResponseStore, body: ResponsesRequest, whole: ResponsesRequest
) -> Callable[[dict[str, Any]], None] | None:
    """Keeps the response to `body`; None if the request or the server wants none kept.

    whole: the request with its whole conversation, which ends with its own items.
    """
    if body.store is False or not store.is_on:
        return None
    own = whole.items[len(whole.items) - len(body.items) :]
    items = [item.model_dump(exclude_none=True) for item in own]
    return lambda response: store.put(response, items, body.previous_response_id)


async def _answer(
    request: Request,
    model: ServedModel,
    body: ResponsesRequest,
    keep: Callable[[dict[str, Any]], None] | None,
) -> Response:
    offer = offer_of(body.all_tools)
    effort = _effort(model, body)
    requested = ResponseContext(
        body, offer, model=model.name, defaults=model.sampling_defaults, effort=effort, keep=keep
    )
    if not _has_input(body):
        return _empty(requested)
    chat = _chat(model, body, offer, effort)
    try:
        make_format = functools.partial(ResponsesFormat, response=requested)
        return await answer_chat(request, model, chat, make_format)
    except RequestError as error:
        raise _renamed(api_errors.from_twofold(error)) from None
    except ApiError as error:
        if body.stream and error.code == CONTEXT_LENGTH:
            return _failed_stream(requested, _renamed(error))
        raise _renamed(error) from None


def _has_input(body: ResponsesRequest) -> bool:
    return any(item.kind != "additional_tools" for item in body.items)


def _chat(model: ServedModel, body: ResponsesRequest, offer: Offer, effort: str | None) -> ChatRequest:
    """The chat request with the same meaning. ApiError 400 naming this API's field."""
    functions, tool_choice = tool_choice_of(body, offer)
    fields: dict[str, Any] = body.passed_on() | {name: getattr(body, name) for name in _SAME}
    fields |= {
        "messages": messages_of(body),
        "max_tokens": body.max_output_tokens,
        "logprobs": body.wants_logprobs or None,
        "tools": functions or None,
        "tool_choice": tool_choice,
        "response_format": _response_format(body),
        "reasoning_effort": effort,
    }
    try:
        return translated(ChatRequest, fields, model)
    except ApiError as error:
        raise _renamed(error) from None


def _effort(model: ServedModel, body: ResponsesRequest) -> str | None:
    """The requested effort, if the model's template reads one in any form.

    Agents send an effort without knowing the model. A model that does not think runs without it, and the response then
    says null.
    """
    effort = body.reasoning.effort if body.reasoning is not None else None
    return effort if reads_effort(model.tokenizer) else None


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": form.type}
    described = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": form.type, "json_schema": described}


def _renamed(error: ApiError) -> ApiError:
    """The error with the field's name in this API."""
    name = (error.param or "").partition(".")[0].partition("[")[0]
    if name not in _NAMES or error.param is None:
        return error
    # Message numbers differ from item numbers.
    param = _NAMES[name] + (error.param.removeprefix(name) if name != "messages" else "")
    described = error.arguments() | {"param": param, "message": error.message.replace(error.param, param, 1)}
    return ApiError(**described)


def _empty(requested: ResponseContext) -> Response:
    """The empty answer to a probe; nothing is computed."""
    new, created_at = response_id(uuid.uuid4().hex), int(time.time())
    body = requested.body(new, created_at, "completed", usage=usage_body(_NOTHING, 0))
    if not requested.request.stream:
        return JSONResponse(body)
    begun = begin_events(requested.body(new, created_at, "in_progress"))
    return _stream(EventNumbers().written([*begun, ("response.completed", {"response": body})]))


def _failed_stream(requested: ResponseContext, error: ApiError) -> Response:
    """Failed stream for a prompt that is too long. Streaming agents shorten it on an error event, but fail on a 400."""
    body = requested.body(response_id(uuid.uuid4().hex), int(time.time()), "in_progress")
    numbers = EventNumbers()
    return _stream(numbers.written(begin_events(body)) + failed(numbers, error, body))


def _stream(events: bytes) -> Response:
    return Response(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
