"""Answer schemas of Anthropic's API, for /openapi.json. Not used when answers are made."""

from __future__ import annotations

from typing import Any, Final, Literal, NotRequired

# Python 3.11's own TypedDict does not tell pydantic which fields are optional.
from typing_extensions import TypedDict

from twofold.server.anthropic.errors import anthropic_status
from twofold.server.http.openapi import REFUSALS, REFUSALS_OF_BODIES, events_of


class AnswerBlock(TypedDict):
    """A content block; which of `text`, `thinking` with `signature`, and `id`, `name`, `input` it has depends on its
    type."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class OutputTokensDetails(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[OutputTokensDetails]


StopReason = Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"]


class _Message(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_sequence: str | None
    usage: MessageUsage


class MessageAnswer(_Message):
    stop_reason: StopReason


class TokenCount(TypedDict):
    input_tokens: int


class AnthropicErrorBody(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorBody


class BegunMessage(_Message):
    stop_reason: None


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: BegunMessage


class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: AnswerBlock


class BlockDeltaBody(TypedDict):
    """Holds the field named after its type; input_json_delta holds `partial_json`."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    partial_json: NotRequired[str]


class BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: BlockDeltaBody


class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageDeltaBody(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: MessageDeltaBody
    usage: MessageUsage


class PlainEvent(TypedDict):
    type: Literal["ping", "message_stop"]


_Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | PlainEvent | AnthropicError

Responses = dict[int | str, dict[str, Any]]
_REFUSED: Final[Responses] = {
    anthropic_status(int(status)): {"description": words, "model": AnthropicError}
    for status, words in (REFUSALS | REFUSALS_OF_BODIES).items()
}
MESSAGES: Final[Responses] = _REFUSED | {
    200: {
        "description": "Done",
        "model": MessageAnswer,
        "content": events_of(_Event, with_done=False, error=None),
    }
}
COUNTED: Final[Responses] = _REFUSED | {200: {"description": "Done", "model": TokenCount}}
