"""Schemas of the answers of OpenAI's and vLLM's routes, for /openapi.json. Not used when answers are made.

A test sends a real server everything that the schema allows, and compares.
"""

from __future__ import annotations

from typing import Literal, NotRequired

# Python 3.11's own TypedDict does not tell pydantic which fields are optional.
from typing_extensions import TypedDict


class ModelStatus(TypedDict):
    """llama.cpp's. A model that failed to load is unloaded: the next request loads it again."""

    value: Literal["unloaded", "loading", "loaded", "unloading"]
    failed: NotRequired[Literal[True]]
    reason: NotRequired[str]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    root: str
    input_modalities: list[Literal["text", "image"]]
    parent: None
    status: ModelStatus
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]


class PromptTokensDetails(TypedDict):
    cached_tokens: int
    image_tokens: NotRequired[int]


class CompletionTokensDetails(TypedDict):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class _Counts(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prefill_time: NotRequired[float]
    decode_time: NotRequired[float]


class Usage(_Counts):
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class StreamUsage(_Counts):
    """Usage of a stream; counts so far (continuous_usage_stats) have no details."""

    prompt_tokens_details: NotRequired[PromptTokensDetails]


class _Answer(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class _Choice(TypedDict):
    index: int
    token_ids: NotRequired[list[int]]
    routed_experts: NotRequired[str]


class PromptLogprob(TypedDict):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Entries per prompt token, by token id; null for the first token."""


class ChatLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatLogprob):
    top_logprobs: list[ChatLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunctionAnswer(TypedDict):
    name: str
    arguments: str


class ToolCallAnswer(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


class CalledCustomAnswer(TypedDict):
    name: str
    input: str


class CustomToolCallAnswer(TypedDict):
    id: str
    type: Literal["custom"]
    custom: CalledCustomAnswer


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallAnswer | CustomToolCallAnswer]]


class ChatChoice(_Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _TextChoice(_Choice):
    text: str
    logprobs: TextLogprobs | None
    prompt_token_ids: NotRequired[list[int]]


class TextChoice(_TextChoice):
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: NotRequired[PromptLogprobs]


class TextCompletion(_Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


class _Chunk(_Answer):
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


class ChatChunkChoice(_Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatChunk(_Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: NotRequired[list[int]]


class TextChunkChoice(_TextChoice):
    finish_reason: Literal["stop", "length"] | None


class TextChunk(_Chunk):
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
