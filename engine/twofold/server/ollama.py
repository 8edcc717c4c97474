"""Ollama's API, translated to the requests of /v1: /api/chat, /api/generate, /api/show, /api/tags, /api/version.

What a request asks for is refused or done exactly as there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from twofold import __version__
from twofold.server.answer_schemas import (
    OllamaChatAnswer,
    OllamaGenerateAnswer,
    OllamaModelList,
    OllamaShown,
    Version,
)
from twofold.server.api_errors import ApiError
from twofold.server.completions import answer_chat, answer_completion
from twofold.server.model_card import listed_names, ollama_card
from twofold.server.ollama_formats import OllamaChat, OllamaGenerate, OllamaRaw, now
from twofold.server.ollama_schemas import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaShowRequest,
)
from twofold.server.openapi import answers, body_of
from twofold.server.request_body import parse_body, translated
from twofold.server.schemas import ChatRequest, CompletionRequest
from twofold.server.state import ServerState
from twofold.server.stream_schemas import OllamaChatLine, OllamaGenerateLine, lines_of
from twofold.server.thinking import thinking_variables

_SAME: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
)
_REFUSED_THERE: Final = ("mirostat", "tfs_z", "typical_p")


def router(state: ServerState) -> APIRouter:
    routes = APIRouter(prefix="/api")

    @routes.post(
        "/chat",
        openapi_extra=body_of(OllamaChatRequest),
        responses=answers(OllamaChatAnswer, stream=lines_of(OllamaChatLine)),
    )
    async def chat(request: Request) -> Response:
        body = await parse_body(request, OllamaChatRequest, state)
        fields = _fields(state, body)
        if not body.messages:
            return _loaded(body, {"message": {"role": "assistant", "content": ""}})
        fields |= {"tools": body.tools or None, "messages": _messages(body.messages)}
        return await answer_chat(state, translated(ChatRequest, fields, state), OllamaChat)

    @routes.post(
        "/generate",
        openapi_extra=body_of(OllamaGenerateRequest),
        responses=answers(OllamaGenerateAnswer, stream=lines_of(OllamaGenerateLine)),
    )
    async def generate(request: Request) -> Response:
        body = await parse_body(request, OllamaGenerateRequest, state)
        fields = _fields(state, body)
        if not body.prompt:
            return _loaded(body, {"response": ""})
        if body.raw:
            # Its own default is 16 tokens.
            fields.setdefault("max_tokens", state.engine.max_context)
            raw = translated(CompletionRequest, fields | {"prompt": body.prompt}, state)
            return await answer_completion(state, raw, OllamaRaw)
        messages = [{"role": "system", "content": body.system}] if body.system else []
        messages.append({"role": "user", "content": body.prompt})
        asked = translated(ChatRequest, fields | {"messages": messages}, state)
        return await answer_chat(state, asked, OllamaGenerate)

    @routes.get("/tags", response_model=None, responses=answers(OllamaModelList))
    async def tags() -> dict[str, Any]:
        return {"models": [ollama_card(state, name) for name in listed_names(state)]}

    @routes.post(
        "/show",
        response_model=None,
        openapi_extra=body_of(OllamaShowRequest),
        responses=answers(OllamaShown),
    )
    async def show(request: Request) -> dict[str, Any]:
        body = await parse_body(request, OllamaShowRequest, state)
        state.check_model(_served_name(state, body.model or body.name or ""))
        return _shown(state)

    @routes.get("/version", response_model=None, responses=answers(Version))
    async def version() -> dict[str, str]:
        return {"version": __version__}

    return routes


def _fields(state: ServerState, body: OllamaChatRequest | OllamaGenerateRequest) -> dict[str, Any]:
    """What both of OpenAI's requests share."""
    name = _served_name(state, body.model)
    state.check_model(name)
    fields: dict[str, Any] = {"model": name, "stream": body.stream is not False, "return_speed": True}
    options = body.options or OllamaOptions()
    for option in (*_SAME, *_REFUSED_THERE):
        fields[option] = getattr(options, option)
    fields["repetition_penalty"] = options.repeat_penalty
    if options.num_predict is not None and options.num_predict >= 0:
        fields["max_tokens"] = options.num_predict
    max_context = state.engine.max_context
    if (options.num_ctx or 0) > max_context:
        raise ApiError(
            400,
            f"num_ctx is {options.num_ctx}; this server's context holds {max_context} tokens (--max-model-len), so "
            "ask for no more",
            param="options.num_ctx",
        )
    if body.format:
        schema = {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
        fields["response_format"] = {"type": "json_object"} if body.format == "json" else schema
    if body.think is not None:
        fields |= _thinking(state, body.think)
    return {field: value for field, value in fields.items() if value is not None}


def _messages(given: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """OpenAI's. Calls without ids get some, of nine letters and digits, as some templates want them."""
    messages: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []
    """Names and ids of the calls that have no result yet."""
    num_calls = 0
    for message in given:
        said: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            said["reasoning_content"] = message.thinking
        if message.tool_calls:
            said["tool_calls"] = calls = []
            waiting = []
            for call in message.tool_calls:
                function, call_id = call.function, call.id or f"call{num_calls:05d}"
                num_calls += 1
                arguments = json.dumps(function.arguments or {}, ensure_ascii=False)
                told = {"name": function.name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": told})
                waiting.append((function.name, call_id))
        if message.role == "tool":
            fitting = [one for one in waiting if message.tool_name in (None, one[0])] or waiting
            answered = message.tool_call_id or (fitting[0][1] if fitting else None)
            waiting = [one for one in waiting if one[1] != answered]
            said |= {} if answered is None else {"tool_call_id": answered}
        messages.append(said)
    return messages


def _thinking(state: ServerState, think: bool | str) -> dict[str, Any]:
    """By the variable that the model's template reads; one that thinks without may have its thinking left out."""
    if isinstance(think, str):
        return {"reasoning_effort": think}
    said = {} if think else {"include_reasoning": False}
    variables = thinking_variables(state.tokenizer, think)
    if variables:
        return said | {"chat_template_kwargs": variables}
    if think and state.chat_marks.reasoning_parser is None:
        raise ApiError(400, f"{state.model_name!r} does not support thinking; leave think out", param="think")
    return said


def _served_name(state: ServerState, name: str) -> str:
    """Ollama's clients may add the tag that means no tag."""
    return name if name in state.model_names else name.removesuffix(":latest")


def _loaded(body: OllamaChatRequest | OllamaGenerateRequest, empty: dict[str, Any]) -> Response:
    """The answer to nothing, by which clients have a model loaded, or unloaded: it is there and stays."""
    done = {"done": True, "done_reason": "unload" if body.keep_alive in (0, "0") else "load"}
    return JSONResponse({"model": body.model, "created_at": now()} | empty | done)


def _shown(state: ServerState) -> dict[str, Any]:
    card, engine = ollama_card(state, state.model_name), state.engine
    defaults = state.sampling_defaults
    parameters = {
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
    }
    family = engine.info.architecture
    return {
        "license": "",
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in parameters.items()),
        "template": engine.tokenizer.chat_template or "",
        "details": card["details"],
        "model_info": {"general.architecture": family, f"{family}.context_length": engine.max_context},
        "capabilities": card["capabilities"],
        "modified_at": card["modified_at"],
    }
