"""POST /v1/responses, translated to /v1/chat/completions with the same refusals and behaviour.

Responses are not stored, so each request carries its whole conversation; the prefix cache makes that cheap.
"""

from __future__ import annotations

import functools
import time
import uuid
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from twofold.api.errors import RequestError
from twofold.api.types import Usage
from twofold.server.bridge.request_body import parse_body, translated
from twofold.server.bridge.served_model import ServedModel
from twofold.server.bridge.state import ServerState
from twofold.server.http import errors as api_errors
from twofold.server.http.errors import CONTEXT_LENGTH, ApiError
from twofold.server.http.openapi import answers, body_of, events_of
from twofold.server.openai.routes import answer_chat
from twofold.server.openai.schemas import ChatRequest
from twofold.server.openai.template_variables import reads_effort
from twofold.server.responses.answer_schemas import ResponseAnswer, ResponseEvent
from twofold.server.responses.format import (
    AskedResponse,
    EventNumbers,
    ResponsesFormat,
    begin_events,
    failed,
    response_id,
    usage_body,
)
from twofold.server.responses.input import messages_of, offer_of, tool_choice_of
from twofold.server.responses.schemas import ResponsesRequest

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

    @routes.post(
        "",
        openapi_extra=body_of(ResponsesRequest),
        responses=answers(ResponseAnswer, stream=events_of(ResponseEvent, with_done=False, error=None)),
    )
    async def responses(request: Request) -> Response:
        body = await parse_body(request, ResponsesRequest, state)
        async with state.using(body.model) as model:
            return await _answer(request, model, body)

    @routes.get("/{response_id}")
    @routes.delete("/{response_id}")
    async def stored(response_id: str) -> Response:
        raise _not_stored(response_id)

    @routes.get("/{response_id}/input_items")
    @routes.post("/{response_id}/cancel")
    async def of_stored(response_id: str) -> Response:
        raise _not_stored(response_id)

    return routes


async def _answer(request: Request, model: ServedModel, body: ResponsesRequest) -> Response:
    offer = offer_of(body.all_tools)
    effort = _effort(model, body)
    asked = AskedResponse(body, offer, model=model.name, defaults=model.sampling_defaults, effort=effort)
    if not any(item.kind != "additional_tools" for item in body.items):
        return _empty(asked)
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
        chat = translated(ChatRequest, fields, model)
    except ApiError as error:
        raise _renamed(error) from None
    try:
        make_format = functools.partial(ResponsesFormat, response=asked)
        return await answer_chat(request, model, chat, make_format)
    except RequestError as error:
        raise _renamed(api_errors.from_twofold(error)) from None
    except ApiError as error:
        if body.stream and error.code == CONTEXT_LENGTH:
            return _failed_stream(asked, _renamed(error))
        raise _renamed(error) from None


def _not_stored(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"the response {response_id[:200]!r} does not exist: responses are not stored (store is always false); "
        "send the previous output in the next request's input",
        param="response_id",
        code="response_not_found",
    )


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
    told = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": form.type, "json_schema": told}


def _renamed(error: ApiError) -> ApiError:
    """The error with the field's name in this API."""
    name = (error.param or "").partition(".")[0].partition("[")[0]
    if name not in _NAMES or error.param is None:
        return error
    # Message numbers differ from item numbers.
    param = _NAMES[name] + (error.param.removeprefix(name) if name != "messages" else "")
    told = error.arguments() | {"param": param, "message": error.message.replace(error.param, param, 1)}
    return ApiError(**told)


def _empty(asked: AskedResponse) -> Response:
    """The empty answer to a probe; nothing is computed."""
    new, created_at = response_id(uuid.uuid4().hex), int(time.time())
    body = asked.body(new, created_at, "completed", usage=usage_body(_NOTHING, 0))
    if not asked.request.stream:
        return JSONResponse(body)
    begun = begin_events(asked.body(new, created_at, "in_progress"))
    return _stream(EventNumbers().written([*begun, ("response.completed", {"response": body})]))


def _failed_stream(asked: AskedResponse, error: ApiError) -> Response:
    """Failed stream for a prompt that is too long. Streaming agents shorten it on an error event, but fail on a 400."""
    body = asked.body(response_id(uuid.uuid4().hex), int(time.time()), "in_progress")
    numbers = EventNumbers()
    return _stream(numbers.written(begin_events(body)) + failed(numbers, error, body))


def _stream(events: bytes) -> Response:
    return Response(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
