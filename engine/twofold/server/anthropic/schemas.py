"""Request bodies of Anthropic's Messages API. Most fields are validated by the chat request that they are translated
to; this file holds the rest. Unknown fields are ignored, as agents send many."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from twofold.server.http.bodies import Body, refused
from twofold.server.openai.messages import MAX_MESSAGES, Name, Text
from twofold.server.openai.schemas import MAX_INT64, MAX_TOOLS, ChatRequest, Stops

MAX_BLOCKS: Final = 4096
"""Most content blocks of one message."""


class Block(BaseModel):
    """A content block: text, thinking (whose signature is not checked), a tool call or its result. Others, such as
    pictures, are read as `text.conversation.content` does."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(min_length=1, max_length=64)]
    text: Text | None = None
    thinking: Text | None = None
    id: Text | None = None
    name: Name | None = None
    input: Any = None
    tool_use_id: Text | None = None
    content: Any = None
    is_error: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return {"type": "text", "text": value} if isinstance(value, str) else value


def _kind_of(value: Any) -> str:
    return "some-blocks" if isinstance(value, list) else "one-text"


Content = Annotated[
    Annotated[Text, Tag("one-text")]
    | Annotated[list[Block], Field(max_length=MAX_BLOCKS, fail_fast=True), Tag("some-blocks")],
    Discriminator(_kind_of),
]


class Turn(BaseModel):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content | None = None


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
    display: Annotated[str, Field(max_length=64)] | None = None
    """"omitted" hides the thinking. Other words show it: clients know more of them with every version."""


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
    system: Content | None = None
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
    stop_sequences: Stops = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class MessagesChat(ChatRequest):
    """The chat request that a Messages request is translated to."""

    generates_nothing: bool = False
