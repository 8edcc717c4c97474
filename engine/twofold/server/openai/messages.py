"""Messages of a conversation: text, tool calls, tool results and their optional fields.

Clients send back what this server and others gave out, so that everything readable is read. The repairs are the same
for every API, whose conversations all become these messages.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from twofold.api.errors import RequestError
from twofold.server.openai.custom_tools import custom_arguments
from twofold.text.conversation.content import THINKING, is_unreadable, readable, separate

if TYPE_CHECKING:
    # The process that parses large bodies imports this file and needs no tokenizer.
    from twofold.server.bridge.models.protocol import ServingTokenizer

MAX_MESSAGES: Final = 2048
MAX_CALLS: Final = 128
"""Most tool calls of one message."""

Text = Annotated[str, Field(max_length=16 * 1024 * 1024)]
Role = Annotated[str, Field(min_length=1, max_length=64)]
_OTHER_ROLES: Final = {"developer": "system", "function": "tool", "ipython": "tool"}
"""Other names of roles."""
KNOWN_ROLES: Final = frozenset(("system", "user", "assistant", "tool", *_OTHER_ROLES))
Name = Annotated[str, Field(min_length=1, max_length=256)]


class CalledFunction(BaseModel):
    name: Name
    arguments: Text | None = None
    """JSON text of an object."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value


class ToolCall(BaseModel):
    """A tool call of an earlier answer. A call of a custom tool is converted to the function that the model knows."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        custom = value.get("custom")
        call = {"id": as_id(value.get("id")), "function": value.get("function")}
        if isinstance(custom, dict) and isinstance(custom.get("input"), str):
            call["function"] = {"name": custom.get("name"), "arguments": custom_arguments(custom["input"])}
        return call


class Message(BaseModel):
    """One message of a conversation. `developer` is OpenAI's newer name of `system`, `function` its older one of
    `tool`; other roles depend on the template. Unknown fields are ignored.
    """

    role: Role
    content: Text | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: Text | None = None
    """Passed to the template, like `name`; not all templates use them."""
    reasoning: Text | None = None
    """Other name of `reasoning_content`."""
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    prefix: bool | None = None
    """The answer continues this message, the last one: Mistral's and DeepSeek's field."""
    partial: bool | None = None
    """Kimi's and Qwen's name of `prefix`."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        read = value | {"tool_call_id": as_id(value.get("tool_call_id"))}
        for name in ("reasoning_content", "reasoning"):
            if value.get(name) is not None:
                read[name] = readable(value[name])
        if value.get("role") == "assistant":
            read |= _answer(read)
        return read | {"content": readable(read.get("content"))}

    def for_template(self, *, reads_thinking: bool) -> dict[str, Any]:
        """The message in the form of `conversation.calls.Turn`."""
        message: dict[str, Any] = {
            "role": _OTHER_ROLES.get(self.role, self.role),
            "content": self.content or "",
        }
        thinking = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        given = {
            "name": self.name,
            "reasoning_content": thinking,
            "reasoning": thinking,
            "tool_call_id": self.tool_call_id,
            # gpt-oss uses it only in messages without text.
            "thinking": thinking if reads_thinking and not self.content else None,
        }
        message |= {name: value for name, value in given.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments or ""},
                }
                for call in self.tool_calls
            ]
        return message


def turns_of(messages: Sequence[Message], tokenizer: ServingTokenizer) -> list[dict[str, Any]]:
    """The conversation for `conversation.arranging`. RequestError for calls of another role than the assistant's, and
    for a question that the model cannot read."""
    reads_thinking = "message.thinking" in (tokenizer.chat_template or "")
    for number, message in enumerate(messages):
        if message.tool_calls and message.role != "assistant":
            param = f"messages[{number}].tool_calls"
            raise RequestError(
                f"{param}: only an assistant's message may have tool calls; move them there", param=param
            )
    answered = ("assistant", "system", "developer")
    requested = list(itertools.takewhile(lambda message: message.role not in answered, reversed(messages)))
    if requested and all(
        message.role == "user" and is_unreadable(message.content or "") for message in requested
    ):
        param = f"messages[{len(messages) - 1}].content"
        raise RequestError(
            f"{param}: {requested[0].content}; send text, or ask a model that reads it", param=param
        )
    return [message.for_template(reads_thinking=reads_thinking) for message in messages]


def _answer(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content without parts of thinking and calls, and these in their fields."""
    content, thinking = separate(message.get("content"), THINKING)
    content, uses = separate(content, ("tool_use",))
    # An answer that OpenAI's models refused or spoke.
    read = {"content": content or message.get("refusal") or _audio(message.get("audio"))}
    if thinking and not (message.get("reasoning_content") or message.get("reasoning")):
        read["reasoning_content"] = "\n".join(filter(None, map(readable, thinking)))
    calls = [
        {"id": use.get("id"), "function": {"name": use.get("name"), "arguments": use.get("input")}}
        for use in uses
    ]
    if message.get("function_call"):
        calls.append({"function": message["function_call"]})
    if calls and not message.get("tool_calls"):
        read["tool_calls"] = calls
    return read


def as_id(value: Any) -> Any:
    """A call's id; some servers number calls."""
    return str(value) if isinstance(value, int) else value


def _audio(audio: Any) -> Any:
    """Spoken answers of OpenAI's models: their transcript, else a part that names them."""
    if not isinstance(audio, Mapping):
        return None
    return audio.get("transcript") or [{"type": "audio"}]
