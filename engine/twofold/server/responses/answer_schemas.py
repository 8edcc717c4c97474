"""Answer and event schemas of /v1/responses, for /openapi.json. Not used when answers are made."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

# Python 3.11's own TypedDict does not tell pydantic which fields are optional.
from typing_extensions import TypedDict

from twofold.server.openai.answer_schemas import ChatTokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class Part(TypedDict):
    """A content part; parts of a message also have annotations and logprobs."""

    type: Literal["output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[ChatTokenLogprob]]


class OutputItem(TypedDict):
    """A message has `role` and `content`, thinking `summary`, `content` and `encrypted_content`, a call the rest."""

    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    id: str
    status: Status
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[Part]]
    summary: NotRequired[list[Part]]
    encrypted_content: NotRequired[str | None]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int
    image_tokens: NotRequired[int]


class OutputDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(TypedDict):
    effort: str | None
    summary: str | None


class ResponseText(TypedDict):
    format: dict[str, Any]
    verbosity: Literal["medium"]


class ResponseAnswer(TypedDict):
    """Repeats the request fields that apply here; `output` is empty in a stream's first events."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: None


class ResponseDeleted(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseItems(TypedDict):
    """Input items of a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False]


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class _Numbered(TypedDict):
    sequence_number: int


class ResponseStateEvent(_Numbered):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseAnswer


class ItemEvent(_Numbered):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _InItem(_Numbered):
    item_id: str
    output_index: int
    content_index: NotRequired[int]
    summary_index: NotRequired[int]


class PartEvent(_InItem):
    type: Literal[
        "response.content_part.added",
        "response.content_part.done",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_part.done",
    ]
    part: Part


class DeltaEvent(_InItem):
    type: Literal[
        "response.output_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_summary_text.delta",
        "response.function_call_arguments.delta",
        "response.custom_tool_call_input.delta",
    ]
    delta: str
    logprobs: NotRequired[list[ChatTokenLogprob]]


class TextDoneEvent(_InItem):
    type: Literal[
        "response.output_text.done", "response.reasoning_text.done", "response.reasoning_summary_text.done"
    ]
    text: str
    logprobs: NotRequired[list[ChatTokenLogprob]]


class ArgumentsDoneEvent(_InItem):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class InputDoneEvent(_InItem):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ResponseErrorEvent(_Numbered):
    type: Literal["error"]
    code: str
    message: str
    param: str | None


ResponseEvent = (
    ResponseStateEvent
    | ItemEvent
    | PartEvent
    | DeltaEvent
    | TextDoneEvent
    | ArgumentsDoneEvent
    | InputDoneEvent
    | ResponseErrorEvent
)
