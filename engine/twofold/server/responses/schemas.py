"""Request body of POST /v1/responses. Most fields are validated by the chat request that they are translated to; this
file holds the rest."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from twofold.server.http.bodies import ModelName, refused
from twofold.server.openai.messages import Name, Role, Text, as_id
from twofold.server.openai.schemas import PassedSampling

MAX_ITEMS: Final = 4096
MAX_TOOLS: Final = 512
TOOL_KINDS: Final = ("function", "custom", "namespace")
"""Tools that the client itself runs."""
IGNORED_TOOLS: Final = (
    "web_search",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "web_search_2025_08_26",
    "image_generation",
    "tool_search",
    "local_shell",
)
"""Tools that agents offer by default and that are ignored: the others work without them."""
_NEEDED: Final = {
    "function_call": ("name",),
    "custom_tool_call": ("name",),
    "additional_tools": ("tools",),
    "item_reference": ("id",),
}
"""Members that an item of this type needs."""


_Budget = refused("use max_output_tokens")


def _is_tool(tool: dict[str, Any]) -> dict[str, Any]:
    kind, name = tool.get("type"), tool.get("name")
    if kind in IGNORED_TOOLS:
        return tool
    if kind not in TOOL_KINDS:
        raise ValueError(
            f"has type {str(kind)[:40]!r}, which runs on OpenAI's servers; offer a function, or leave it out"
        )
    if not isinstance(name, str) or not name:
        raise ValueError("needs a text in 'name', beside 'type'")
    if not isinstance(tool.get("description"), str | None):
        raise ValueError("needs a text in 'description', or none")
    if kind == "function" and not isinstance(tool.get("parameters"), dict | None):
        raise ValueError("needs a JSON schema, an object, in 'parameters', or none")
    if kind == "namespace":
        held = tool.get("tools")
        if not isinstance(held, list) or len(held) > MAX_TOOLS:
            raise ValueError(f"needs a list of at most {MAX_TOOLS} tools in 'tools'")
        for each in held:
            if not isinstance(each, dict) or each.get("type") not in ("function", "custom"):
                raise ValueError("contains a tool that is neither a function nor a custom tool")
            _is_tool(each)
    return tool


Tools = Annotated[
    list[Annotated[dict[str, Any], AfterValidator(_is_tool)]], Field(max_length=MAX_TOOLS, fail_fast=True)
]
ShortText = Annotated[str, Field(max_length=256)]


class InputItem(BaseModel):
    """An item of a conversation: message (the default type), tool call, tool output, or thinking. Items of other
    servers' tools are read if they are calls or outputs with a `call_id`, else ignored."""

    type: ShortText | None = None
    id: Text | None = None
    """Id of an item in an answer. An id alone refers to that item."""
    role: Role | None = None
    content: Any = None
    """Text or parts; read as a chat message's."""
    call_id: Text | None = None
    name: Name | None = None
    namespace: ShortText | None = None
    arguments: Text | None = None
    """JSON text of an object."""
    input: Text | None = None
    action: Any = None
    """Action of a call of OpenAI's own tools, instead of arguments."""
    output: Any = None
    summary: Any = None
    encrypted_content: Text | None = None
    tools: Tools | None = None

    @property
    def kind(self) -> str:
        is_reference = self.type is None and self.id is not None and self.role is None
        return "item_reference" if is_reference else self.type or "message"

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        arguments = value.get("arguments")
        text = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
        return value | {"call_id": as_id(value.get("call_id")), "arguments": text}

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        needed = ("role",) if self.kind == "message" else _NEEDED.get(self.kind, ())
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.kind!r} needs {name!r}")
        return self


class Reasoning(BaseModel):
    effort: Annotated[str, Field(max_length=64)] | None = None
    summary: Annotated[str, Field(max_length=64)] | None = None


class TextFormat(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError(
                "type 'json_schema', and no other, has a schema in 'schema'; send both or neither"
            )
        return self


class TextConfig(BaseModel):
    format: TextFormat | None = None
    verbosity: Annotated[str, Field(max_length=64)] | None = None


def _kind_of_input(value: object) -> str:
    return "some-items" if isinstance(value, list) else "a-text"


_Input = Annotated[
    Annotated[Text, Tag("a-text")]
    | Annotated[list[InputItem], Field(max_length=MAX_ITEMS, fail_fast=True), Tag("some-items")],
    Discriminator(_kind_of_input),
]


class ResponsesRequest(PassedSampling):
    """Body of POST /v1/responses."""

    input: _Input
    """Input items; empty for a probe, answered at once."""
    model: ModelName | None = None
    instructions: Text | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    top_logprobs: int | None = None
    include: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=32)] | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    """No effect: prompts with the same `cache_salt` share the cache, whatever their key."""
    # vLLM's fields, as at /v1/chat/completions.
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    cache_salt: ShortText | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    store: bool | None = None
    """Whether the response can be continued or read by its id later; the default is true."""
    previous_response_id: ShortText | None = None
    """The response whose input and output come before this input."""
    # Refused, because ignoring them would change the answer.
    conversation: refused("use previous_response_id, or send the whole conversation in input") = None  # type: ignore[valid-type]
    prompt: refused("prompts are not stored; put the text into instructions and input") = None  # type: ignore[valid-type]
    background: refused("answers are sent while the connection is open; leave it out") = None  # type: ignore[valid-type]
    messages: refused("use input") = None  # type: ignore[valid-type]
    max_tokens: _Budget = None  # type: ignore[valid-type]
    max_completion_tokens: _Budget = None  # type: ignore[valid-type]
    response_format: refused("use text.format") = None  # type: ignore[valid-type]
    reasoning_effort: refused("use reasoning.effort") = None  # type: ignore[valid-type]

    @property
    def items(self) -> list[InputItem]:
        """The input items; a plain text is the user's only message."""
        if isinstance(self.input, list):
            return self.input
        return [InputItem(role="user", content=self.input)] if self.input else []

    @property
    def all_tools(self) -> list[dict[str, Any]]:
        """Tools of the request, then those in input items."""
        return [*(self.tools or ()), *(tool for item in self.items for tool in item.tools or ())]

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


class InputTokensRequest(ResponsesRequest):
    """Body of POST /v1/responses/input_tokens."""

    input: _Input = ""
