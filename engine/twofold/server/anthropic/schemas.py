"""Request bodies of Anthropic's Messages API. Most fields are validated by the chat request that they are translated
to; this file holds the rest. Unknown fields are ignored, as agents send many."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema

from twofold.server.http.bodies import Body, refused
from twofold.server.openai.messages import MAX_MESSAGES, Name, Text
from twofold.server.openai.schemas import MAX_INT64, MAX_TOOLS, ChatRequest, StopText

MAX_BLOCKS: Final = 4096
"""Most content blocks of one message."""
MAX_STOP_SEQUENCES: Final = 64

_HINTS: Final = {
    "image": "the model reads text only; describe the picture in a text block",
    "document": "the model reads text only; put the document's text into a text block",
    "tool_reference": "tools are not searched; offer all of them",
}
_PLACES: Final = "a text, thinking, redacted_thinking, tool_use or tool_result block belongs here"


class TextBlock(BaseModel):
    type: Literal["text"]
    text: Text


class ThinkingBlock(BaseModel):
    """Thinking of an earlier answer. Its signature is not checked: nothing here depends on its author."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(BaseModel):
    """Thinking that only Anthropic's models can read; it is dropped."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(BaseModel):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Name
    input: dict[str, Any] | None = None


class _UnreadBlock(BaseModel):
    """A block of any other kind."""

    type: str = ""

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            raise ValueError('expected an object such as {"type": "text", "text": "…"}')
        raise ValueError(f"blocks of type {kind[:40]!r} are not supported: {_HINTS.get(kind, _PLACES)}")


def _one_of(*kinds: str) -> Discriminator:
    """Discriminator that makes pydantic report the errors of the intended kind only. Its tags are not field names, so
    that errors leave them out."""

    def kind_of(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return f"a {kind}" if kind in kinds else "another kind"

    return Discriminator(kind_of)


_TEXT_OR_BLOCKS: Final = Discriminator(lambda value: "some blocks" if isinstance(value, list) else "one text")
_OneText = Annotated[Text, Tag("one text")]
_Text = Annotated[TextBlock, Tag("a text")]
_Unread = Annotated[SkipJsonSchema[_UnreadBlock], Tag("another kind")]
ResultBlock = Annotated[_Text | _Unread, _one_of("text")]
_ResultBlocks = Annotated[list[ResultBlock], Field(max_length=MAX_BLOCKS, fail_fast=True), Tag("some blocks")]


class ToolResultBlock(BaseModel):
    """Result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: Annotated[_OneText | _ResultBlocks, _TEXT_OR_BLOCKS] | None = None
    is_error: bool | None = None


Block = Annotated[
    _Text
    | Annotated[ThinkingBlock, Tag("a thinking")]
    | Annotated[RedactedThinkingBlock, Tag("a redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("a tool_use")]
    | Annotated[ToolResultBlock, Tag("a tool_result")]
    | _Unread,
    _one_of("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]
_Blocks = Annotated[list[Block], Field(max_length=MAX_BLOCKS, fail_fast=True), Tag("some blocks")]
_TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS, fail_fast=True), Tag("some blocks")]


class Turn(BaseModel):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[_OneText | _Blocks, _TEXT_OR_BLOCKS]


class OfferedTool(BaseModel):
    """A client tool, or one that Anthropic's servers or models know by its `type`."""

    type: Annotated[str, Field(max_length=64)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel):
    """Whether the model thinks, and its thinking budget."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None
    """Tokens after which the thinking is ended."""
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(BaseModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]

    model_config = ConfigDict(populate_by_name=True)


class OutputConfig(BaseModel):
    effort: Annotated[str, Field(max_length=64)] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Body):
    """Body of POST /v1/messages/count_tokens: all inputs of a prompt."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Annotated[_OneText | _TextBlocks, _TEXT_OR_BLOCKS] | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Older location of `output_config.format`."""
    mcp_servers: refused("no other server is called; offer its tools in tools") = None  # type: ignore[valid-type]


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)]
    """0: run prefill to warm the prefix cache, without an answer."""
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOP_SEQUENCES)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class MessagesChat(ChatRequest):
    """The chat request that a Messages request is translated to."""

    stop: Annotated[list[StopText], Field(max_length=MAX_STOP_SEQUENCES)] | None = None
    answers_nothing: bool = False
