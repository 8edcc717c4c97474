"""Schemas of the answers of Ollama's API, for /openapi.json. Not used when answers are made."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

# Python 3.11's own TypedDict does not tell pydantic which fields are optional.
from typing_extensions import TypedDict

from twofold.server.openai.answer_schemas import ChatTokenLogprob


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


class OllamaVersion(TypedDict):
    """`version` is Ollama's."""

    version: str
    twofold_version: str


class OllamaPulled(TypedDict):
    status: str


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


class OllamaEmbedded(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(TypedDict):
    embedding: list[float]


class OllamaShown(TypedDict):
    license: str
    modelfile: str
    parameters: str
    template: str
    details: OllamaModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class _OllamaCounts(TypedDict):
    """Counts and durations: of a whole answer, or of the last line of a stream."""

    model: str
    created_at: str
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[ChatTokenLogprob]]


class _OllamaAnswer(_OllamaCounts):
    done: Literal[True]
    done_reason: Literal["stop", "length", "load", "unload"]


class _OllamaLine(_OllamaCounts):
    done: bool
    done_reason: NotRequired[Literal["stop", "length"]]


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


class OllamaChatLine(_OllamaLine):
    message: OllamaChatMessage


class OllamaGenerateLine(_OllamaLine):
    response: str
    thinking: NotRequired[str]
    context: NotRequired[list[int]]
