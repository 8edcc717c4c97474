"""Schemas of every 200 answer, for /openapi.json. Request schemas are in the files that parse requests.

Not used when answers are made; a test sends a real server everything that the schema allows, and compares.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

# Python 3.11's own TypedDict does not tell pydantic which fields are optional.
from typing_extensions import TypedDict

Phase = Literal["loading", "ready", "draining"]


class Version(TypedDict):
    version: str


class Readiness(TypedDict):
    status: Phase


class Health(Readiness):
    """Without a model the fields after `telemetry` are left out."""

    version: str
    uptime_s: float
    telemetry: dict[str, Any]
    model: NotRequired[str]
    max_context: NotRequired[int]
    accelerator: NotRequired[str]
    accelerator_reason: NotRequired[str]
    emulated: NotRequired[bool]
    clock: NotRequired[str]
    policy: NotRequired[str | None]
    num_slots: NotRequired[int]
    output_changes: NotRequired[list[str]]
    mapped_weights: NotRequired[dict[str, Any] | None]
    queue: NotRequired[dict[str, int]]


# ---- models ---------------------------------------------------------------------------------------------------------


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: None
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]


class OllamaModelDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    type: str
    description: str
    tags: list[str]
    capabilities: list[str]
    parameters: str
    details: OllamaModelDetails


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]
    first_id: str
    last_id: str
    has_more: Literal[False]
    models: list[OllamaModel]


# ---- answers --------------------------------------------------------------------------------------------------------


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    prefill_time: NotRequired[float]
    decode_time: NotRequired[float]


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


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: NotRequired[list[int]]
    routed_experts: NotRequired[str]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]
    routed_experts: NotRequired[str]


class TextCompletion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


# ---- llama.cpp's ----------------------------------------------------------------------------------------------------


class SlotParams(TypedDict):
    n_predict: int
    max_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: list[str]
    ignore_eos: bool


class NextToken(TypedDict):
    has_next_token: bool
    n_remain: int
    n_decoded: int


class Slot(TypedDict):
    """An idle slot has neither request nor counts."""

    id: int
    id_task: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    request_id: NotRequired[str]
    n_prompt_tokens: NotRequired[int]
    n_prompt_tokens_processed: NotRequired[int]
    params: NotRequired[SlotParams]
    next_token: NotRequired[list[NextToken]]
    prompt: NotRequired[str]


class Props(TypedDict):
    default_generation_settings: Slot
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


# ---- Ollama's -------------------------------------------------------------------------------------------------------


class OllamaVersion(Version):
    """`version` is Ollama's."""

    twofold_version: str


class OllamaModelList(TypedDict):
    models: list[OllamaModel]


class OllamaProcess(TypedDict):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaProcessList(TypedDict):
    models: list[OllamaProcess]


class OllamaShown(TypedDict):
    license: str
    modelfile: str
    parameters: str
    template: str
    details: OllamaModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class _OllamaAnswer(TypedDict):
    model: str
    created_at: str
    done: Literal[True]
    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[ChatTokenLogprob]]


class OllamaCalledFunction(TypedDict):
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(TypedDict):
    id: str
    function: OllamaCalledFunction


class OllamaChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaToolCall]]


class OllamaChatAnswer(_OllamaAnswer):
    message: OllamaChatMessage


class OllamaGenerateAnswer(_OllamaAnswer):
    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]
