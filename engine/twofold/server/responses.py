"""POST /v1/responses, translated to /v1/chat/completions: what a request asks for is refused or done exactly as there.

Nothing is stored, so each request brings its whole conversation; the prefix cache makes that cheap.
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
from twofold.server import api_errors
from twofold.server.api_errors import CONTEXT_LENGTH, ApiError
from twofold.server.completions import answer_chat
from twofold.server.openapi import answers, body_of
from twofold.server.request_body import parse_body, translated
from twofold.server.responses_answers import ResponseAnswer, ResponseEvent
from twofold.server.responses_format import (
    AskedResponse,
    EventNumbers,
    ResponsesFormat,
    failed,
    response_id,
    usage_body,
)
from twofold.server.responses_input import messages_of, offer_of, tool_choice_of
from twofold.server.responses_schemas import ResponsesRequest
from twofold.server.schemas import ChatRequest
from twofold.server.state import ServerState
from twofold.server.stream_schemas import events_of

_SAME: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "ignore_eos",
    "cache_salt",
    "parallel_tool_calls",
    "stream",
)
_NAMES: Final = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Of the chat's fields here."""
_NOTHING: Final = Usage(0, 0, 0.0, 0.0)


def router(state: ServerState) -> APIRouter:
    routes = APIRouter(prefix="/v1/responses")

    @routes.post(
        "",
        openapi_extra=body_of(ResponsesRequest),
        responses=answers(ResponseAnswer, stream=events_of(ResponseEvent, with_done=False, error=None)),
    )
    async def responses(request: Request) -> Response:
        body = await parse_body(request, ResponsesRequest, state)
        state.check_model(body.model)
        offer = offer_of(body.all_tools)
        effort, variables = _thinking(state, body)
        asked = AskedResponse(body, offer, state.model_name, state.sampling_defaults, effort)
        if not any(item.kind != "additional_tools" for item in body.items):
            return _empty(asked)
        functions, tool_choice = tool_choice_of(body, offer)
        fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME} | {
            "model": body.model,
            "messages": messages_of(body, state.tokenizer),
            "max_tokens": body.max_output_tokens,
            "tools": functions or None,
            "tool_choice": tool_choice,
            "response_format": _response_format(body),
            "chat_template_kwargs": variables or None,
            "reasoning_effort": effort if "reasoning_effort" in state.tokenizer.template_variables else None,
        }
        try:
            chat = translated(ChatRequest, fields, state)
        except ApiError as error:
            raise _renamed(error) from None
        try:
            return await answer_chat(state, chat, functools.partial(ResponsesFormat, response=asked))
        except RequestError as error:
            raise _renamed(api_errors.from_twofold(error)) from None
        except ApiError as error:
            if body.stream and error.code == CONTEXT_LENGTH:
                return _failed_stream(asked, _renamed(error))
            raise _renamed(error) from None

    @routes.get("/{response_id}")
    @routes.delete("/{response_id}")
    async def stored(response_id: str) -> Response:
        raise _not_stored(response_id)

    @routes.get("/{response_id}/input_items")
    @routes.post("/{response_id}/cancel")
    async def of_stored(response_id: str) -> Response:
        raise _not_stored(response_id)

    return routes


def _not_stored(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"the response {response_id[:200]!r} is not here: none is stored (store is answered with false); keep what "
        "the answer had, and send it in the next request's input",
        param="response_id",
        code="response_not_found",
    )


def _thinking(state: ServerState, body: ResponsesRequest) -> tuple[str | None, dict[str, Any]]:
    """The effort, if this model's template reads one in whatever form, and the template's variables.

    Agents send an effort without knowing the model, so one that does not think is asked without it; the response says
    null then.
    """
    known, given = state.tokenizer.template_variables, body.chat_template_kwargs or {}
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is None or not known & {"reasoning_effort", "enable_thinking"}:
        return None, given
    thinks = {"enable_thinking": effort not in ("none", "minimal")} if "enable_thinking" in known else {}
    return effort, thinks | given


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": form.type}
    told = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": form.type, "json_schema": told}


def _renamed(error: ApiError) -> ApiError:
    """With the name that the field has here."""
    name = (error.param or "").partition(".")[0].partition("[")[0]
    if name not in _NAMES or error.param is None:
        return error
    # A message's number is no item's number.
    param = _NAMES[name] + (error.param.removeprefix(name) if name != "messages" else "")
    told = error.arguments() | {"param": param, "message": error.message.replace(error.param, param, 1)}
    return ApiError(**told)


def _empty(asked: AskedResponse) -> Response:
    """The answer to a probe: there is nothing to say, and nothing is computed."""
    new, created_at = response_id(uuid.uuid4().hex), int(time.time())
    body = asked.body(new, created_at, "completed", usage=usage_body(_NOTHING, 0))
    if not asked.request.stream:
        return JSONResponse(body)
    begun = {"response": asked.body(new, created_at, "in_progress")}
    said = [
        ("response.created", begun),
        ("response.in_progress", begun),
        ("response.completed", {"response": body}),
    ]
    return _stream(EventNumbers().written(said))


def _failed_stream(asked: AskedResponse, error: ApiError) -> Response:
    """Of a prompt that is too long: agents that stream shorten it when an event says so, and give up at a 400."""
    new, created_at = response_id(uuid.uuid4().hex), int(time.time())
    body, numbers = asked.body(new, created_at, "in_progress"), EventNumbers()
    begun = [(kind, {"response": body}) for kind in ("response.created", "response.in_progress")]
    return _stream(numbers.written(begun) + failed(numbers, error, body))


def _stream(events: bytes) -> Response:
    return Response(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
