"""Schemas of stream events, for /openapi.json. Not used when answers are made.

FastAPI describes its own streams the same way: `itemSchema` is one event (or one line), whose `data` is JSON.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NotRequired

from pydantic import TypeAdapter

# Python 3.11's own TypedDict does not tell pydantic which fields are optional.
from typing_extensions import TypedDict

from twofold.server.http.openapi import COMPONENTS
from twofold.server.openai.answer_schemas import (
    ChatLogprobs,
    ChatTokenLogprob,
    OllamaChatMessage,
    PromptTokensDetails,
    TextLogprobs,
)

EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"


def events_of(event: Any, *, with_done: bool = True, error: str | None = "Error") -> dict[str, Any]:
    """The content of an event stream.

    Args:
        event: type of `data`.
        with_done: whether the last event's data is [DONE].
        error: component of the event that ends a failed stream; None: `event` covers it.
    """
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": _schema(event, error),
    }
    if with_done:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    properties = {"event": {"type": "string"}, "data": data}
    return {EVENTS: {"itemSchema": {"type": "object", "required": ["data"], "properties": properties}}}


def lines_of(line: Any) -> dict[str, Any]:
    """The content of a stream of JSON lines."""
    return {LINES: {"itemSchema": _schema(line, "Error")}}


def _schema(said: Any, error: str | None) -> dict[str, Any]:
    """A schema with `$defs`, which `openapi.document` moves to OpenAPI's place for them."""
    schema = TypeAdapter(said).json_schema(ref_template=COMPONENTS + "{model}")
    if error is None:
        return schema
    defs = schema.pop("$defs", {})
    return {"anyOf": [schema, {"$ref": COMPONENTS + error}], "$defs": defs}


class StreamUsage(TypedDict):
    """Usage of a stream; counts so far (continuous_usage_stats) have no details."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    prefill_time: NotRequired[float]
    decode_time: NotRequired[float]


class _Chunk(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: NotRequired[StreamUsage | None]


class CalledFunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class CalledCustomDelta(TypedDict):
    name: NotRequired[str]
    input: str


class ToolCallDelta(TypedDict):
    """Part of a tool call. Its first delta has id, type and name. The input of a custom tool comes in one piece."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[CalledFunctionDelta]
    custom: NotRequired[CalledCustomDelta]


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: NotRequired[list[int]]
    routed_experts: NotRequired[str]


class ChatChunk(_Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: NotRequired[list[int]]


class TextChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    routed_experts: NotRequired[str]


class TextChunk(_Chunk):
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


class _OllamaLine(TypedDict):
    """A line of a stream; the last one has the finish reason, counts and durations."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[ChatTokenLogprob]]


class OllamaChatLine(_OllamaLine):
    message: OllamaChatMessage


class OllamaGenerateLine(_OllamaLine):
    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]
