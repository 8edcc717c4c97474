"""Ollama's API: /api/chat and /api/generate, translated to requests of /v1, and the routes that its clients query.

Refusals and behaviour are those of /v1.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Sequence
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from twofold import __version__
from twofold.server.bridge.models.served_model import ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.requests.request_body import parse_body, translated
from twofold.server.http.errors import ApiError, set_error_format
from twofold.server.http.openapi import answers, body_of, lines_of
from twofold.server.ollama.answer_schemas import (
    OllamaChatAnswer,
    OllamaChatLine,
    OllamaGenerateAnswer,
    OllamaGenerateLine,
    OllamaModelList,
    OllamaProcessList,
    OllamaPulled,
    OllamaShown,
    OllamaVersion,
)
from twofold.server.ollama.formats import OllamaChat, OllamaGenerate, OllamaRaw, now
from twofold.server.ollama.keep_alive import keep_alive_s, using_model
from twofold.server.ollama.model_card import (
    model_info,
    ollama_card,
    ollama_cards,
    ollama_process,
    served_name,
)
from twofold.server.ollama.schemas import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaPullRequest,
    OllamaRequest,
    OllamaShowRequest,
)
from twofold.server.openai.completion_schema import CompletionRequest
from twofold.server.openai.model_card import listed_models
from twofold.server.openai.routes import answer_chat, answer_completion
from twofold.server.openai.schemas import ChatRequest
from twofold.server.openai.template_variables import thinking_variables

OLLAMA_VERSION: Final = "0.12.11"
"""Ollama version of this API. Clients compare it with their minimum: VS Code needs 0.6.4 or later."""

_log = logging.getLogger("twofold.server")

set_error_format("/api", lambda error: (error.status, {"error": error.message}))


def router(state: ServerState) -> APIRouter:
    routes = APIRouter(prefix="/api")
    state.computing_paths |= {"/api/chat", "/api/generate"}

    @routes.post(
        "/chat",
        openapi_extra=body_of(OllamaChatRequest),
        responses=answers(OllamaChatAnswer, stream=lines_of(OllamaChatLine)),
    )
    async def chat(request: Request) -> Response:
        body = await parse_body(request, OllamaChatRequest, state)
        if not body.messages:
            return await _load(state, body, {"message": {"role": "assistant", "content": ""}})
        async with using_model(state, body) as model:
            fields = _fields(model, body)
            last = body.messages[-1]
            fields |= {
                "tools": body.tools or None,
                "tool_choice": body.tool_choice if body.tools else None,
                "messages": _messages(body.messages),
                "continue_final_message": last.role == "assistant" and not last.tool_calls,
            }
            return await answer_chat(request, model, translated(ChatRequest, fields, model), OllamaChat)

    @routes.post(
        "/generate",
        openapi_extra=body_of(OllamaGenerateRequest),
        responses=answers(OllamaGenerateAnswer, stream=lines_of(OllamaGenerateLine)),
    )
    async def generate(request: Request) -> Response:
        body = await parse_body(request, OllamaGenerateRequest, state)
        if not body.prompt and not body.suffix:
            return await _load(state, body, {"response": ""})
        async with using_model(state, body) as model:
            return await _generate(request, model, body)

    _add_queries(routes, state)
    return routes


def _add_queries(routes: APIRouter, state: ServerState) -> None:
    @routes.get("/tags", response_model=None, responses=answers(OllamaModelList))
    @routes.head("/tags", include_in_schema=False)
    async def tags() -> dict[str, Any]:
        return {"models": await ollama_cards(state)}

    @routes.get("/ps", response_model=None, responses=answers(OllamaProcessList))
    async def processes() -> dict[str, Any]:
        loaded = [(model, name) for model, name in listed_models(state) if model.state == "loaded"]
        made = await asyncio.to_thread(lambda: [ollama_process(state, *each) for each in loaded])
        return {"models": made}

    @routes.post(
        "/show",
        response_model=None,
        openapi_extra=body_of(OllamaShowRequest),
        responses=answers(OllamaShown),
    )
    async def show(request: Request) -> dict[str, Any]:
        body = await parse_body(request, OllamaShowRequest, state)
        name = served_name(state, body.model or body.name or "")
        return await asyncio.to_thread(_shown, state.find(name), name)

    @routes.post(
        "/pull",
        openapi_extra=body_of(OllamaPullRequest),
        responses=answers(OllamaPulled, stream=lines_of(OllamaPulled)),
    )
    async def pull(request: Request) -> Response:
        """A served model is there already; no other one is downloaded."""
        body = await parse_body(request, OllamaPullRequest, state)
        state.find(served_name(state, body.model or body.name or ""))
        done = {"status": "success"}
        if body.stream is False:
            return JSONResponse(done)
        lines = [{"status": "pulling manifest"}, done]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        return Response(text, media_type="application/x-ndjson")

    @routes.get("/version", response_model=None, responses=answers(OllamaVersion))
    @routes.head("/version", include_in_schema=False)
    async def version() -> dict[str, str]:
        return {"version": OLLAMA_VERSION, "twofold_version": __version__}


async def _generate(request: Request, model: ServedModel, body: OllamaGenerateRequest) -> Response:
    fields = _fields(model, body)
    if body.raw or body.suffix:
        # OpenAI's default there is 16 tokens.
        fields.setdefault("max_tokens", -1)
        fields["logprobs"] = fields.pop("top_logprobs", None)
        for name in ("include_reasoning", "reasoning_effort", "chat_template_kwargs") if body.suffix else ():
            fields.pop(name, None)  # a gap is filled without thinking
        raw = translated(
            CompletionRequest, fields | {"prompt": body.prompt or "", "suffix": body.suffix}, model
        )
        return await answer_completion(request, model, raw, OllamaRaw)
    messages: list[dict[str, Any]] = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": _parts(body.prompt, body.images)})
    requested = translated(ChatRequest, fields | {"messages": messages}, model)
    return await answer_chat(request, model, requested, OllamaGenerate, context=body.context or ())


def _fields(model: ServedModel, body: OllamaRequest) -> dict[str, Any]:
    """Fields common to both of OpenAI's requests."""
    fields: dict[str, Any] = {"model": model.name, "stream": body.stream is not False, "return_speed": True}
    options = body.options or OllamaOptions()
    fields |= options.passed_on()
    for name in options.ignored:
        _report_ignored(name)
    if options.num_predict is not None and options.num_predict > 0:
        fields["max_tokens"] = options.num_predict
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.format or body.format == {}:
        schema = {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
        fields["response_format"] = {"type": "json_object"} if body.format == "json" else schema
    if body.think is not None:
        fields |= _thinking(model, body.think)
    return {field: value for field, value in fields.items() if value is not None}


@functools.lru_cache(maxsize=16)
def _report_ignored(name: str) -> None:
    """Log once per option: clients send it with every request."""
    _log.warning(
        "the option %s is ignored: this filter does not exist here; use top_p, top_k and min_p", name
    )


def _messages(given: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Messages in OpenAI's format."""
    return [
        {
            "role": message.role,
            "content": _parts(message.content, message.images),
            "reasoning_content": message.thinking or None,
            "tool_calls": [call.model_dump() for call in message.tool_calls or ()] or None,
            "name": message.tool_name,
            "tool_call_id": message.tool_call_id,
        }
        for message in given
    ]


def _parts(content: Any, images: Sequence[Any] | None) -> list[Any]:
    """Content and pictures as OpenAI's parts: each in place of one mark `[img]` of the text, further ones before it."""
    pictures = [{"type": "image", "image": image} for image in images or ()]
    if not isinstance(content, str):
        return [*pictures, *(content if isinstance(content, list) else [content])]
    first, *texts = content.split("[img]", len(pictures))
    marked = pictures[: len(texts)]
    placed = [part for pair in zip(marked, texts, strict=True) for part in pair]
    return [*pictures[len(texts) :], first, *placed]


def _thinking(model: ServedModel, think: bool | str) -> dict[str, Any]:
    """Thinking fields by the variable that the model's template reads; thinking without a switch can be left out of the
    answer."""
    if isinstance(think, str):
        return {"reasoning_effort": think}
    reply = {} if think else {"include_reasoning": False}
    variables = thinking_variables(model.tokenizer, think)
    if variables:
        return reply | {"chat_template_kwargs": variables}
    if think and model.chat_marks.reasoning_parser is None:
        raise ApiError(400, f"{model.name!r} does not support thinking; leave think out", param="think")
    return reply


async def _load(state: ServerState, body: OllamaRequest, empty: dict[str, Any]) -> Response:
    """The answer to an empty request, by which clients load or unload a model."""
    unloads = body.keep_alive is not None and keep_alive_s(body) == 0
    if unloads and state.manager is not None:
        state.manager.unload(state.find(served_name(state, body.model)))
    else:
        async with using_model(state, body):
            pass
    done = {"done": True, "done_reason": "unload" if unloads else "load"}
    return JSONResponse({"model": body.model, "created_at": now()} | empty | done)


def _shown(model: ServedModel, name: str) -> dict[str, Any]:
    card, engine = ollama_card(model, name), model.loaded_engine
    defaults = model.sampling_defaults
    parameters = {
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
    }
    return {
        "license": "",
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in parameters.items()),
        "template": "" if engine is None else engine.tokenizer.chat_template or "",
        "details": card["details"],
        "model_info": model_info(model),
        "capabilities": card["capabilities"],
        "modified_at": card["modified_at"],
    }
