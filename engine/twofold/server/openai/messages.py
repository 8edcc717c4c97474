"""Messages of a conversation: text, tool calls, tool results and their optional fields.

Clients send back what this server and others gave out, so that everything readable is read. The repairs are the same
for every API, whose conversations all become these messages.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from twofold.api.errors import RequestError
from twofold.server.openai.custom_tools import custom_arguments
from twofold.text.conversation.content import (
    THINKING,
    is_unreadable,
    placeholder,
    readable,
    separate,
    with_pictures,
)

if TYPE_CHECKING:
    # The process that parses large bodies imports this file and needs no tokenizer.
    from twofold.server.bridge.models.protocol import ServingTokenizer

MAX_MESSAGES: Final = 2048
MAX_CALLS: Final = 128
"""Most tool calls of one message."""
MAX_PICTURES: Final = 512
"""Most pictures of one message; `limit_mm_per_prompt` limits those of a request."""
MAX_PICTURE_CHARS: Final = 256 * 1024 * 1024
"""Longest picture; `max_body_bytes` limits the request."""

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


class Picture(BaseModel):
    """A picture of a message."""

    at: Annotated[int, Field(ge=0)]
    """Its place in the message's text, characters."""
    url: Annotated[str, Field(max_length=MAX_PICTURE_CHARS)]
    """A URL, or the file in base64."""
    name: str = ""
    detail: str | None = None


class Message(BaseModel):
    """One message of a conversation. `developer` is OpenAI's newer name of `system`, `function` its older one of
    `tool`; other roles depend on the template. Unknown fields are ignored.
    """

    role: Role
    content: Text | None = None
    pictures: Annotated[list[Picture], Field(max_length=MAX_PICTURES, fail_fast=True)] | None = None
    """Pictures of `content`, which clients send as its parts."""
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
        return read | _with_pictures(read.get("content"))

    def text_with(self, replace: Callable[[Picture], str]) -> str:
        """The content with a text in place of each picture."""
        text, pieces, begin = self.content or "", [], 0
        for picture in self.pictures or ():
            pieces += [text[begin : picture.at], replace(picture)]
            begin = picture.at
        return "".join([*pieces, text[begin:]])

    def for_template(self, content: str, *, reads_thinking: bool) -> dict[str, Any]:
        """The message in the form of `conversation.calls.Turn`, with this content."""
        message: dict[str, Any] = {"role": _OTHER_ROLES.get(self.role, self.role), "content": content}
        thinking = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        given = {
            "name": self.name,
            "reasoning_content": thinking,
            "reasoning": thinking,
            "tool_call_id": self.tool_call_id,
            # gpt-oss uses it only in messages without text.
            "thinking": thinking if reads_thinking and not content else None,
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


def turns_of(
    messages: Sequence[Message],
    tokenizer: ServingTokenizer,
    replace: Callable[[Picture], str] = lambda picture: placeholder("image", picture.name),
) -> list[dict[str, Any]]:
    """The conversation for `conversation.arranging`, with a text in place of each picture. RequestError for calls of
    another role than the assistant's, and for a question that the model cannot read."""
    reads_thinking = "message.thinking" in (tokenizer.chat_template or "")
    for number, message in enumerate(messages):
        if message.tool_calls and message.role != "assistant":
            param = f"messages[{number}].tool_calls"
            raise RequestError(
                f"{param}: only an assistant's message may have tool calls; move them there", param=param
            )
    contents = [message.text_with(replace) for message in messages]
    requested = newest(messages)
    if requested and all(messages[at].role == "user" and is_unreadable(contents[at]) for at in requested):
        param = f"messages[{len(messages) - 1}].content"
        raise RequestError(f"{param}: {contents[-1]}; send text, or ask a model that reads it", param=param)
    return [
        message.for_template(content, reads_thinking=reads_thinking)
        for message, content in zip(messages, contents, strict=True)
    ]


def newest(messages: Sequence[Message]) -> range:
    """Numbers of the messages after the last answer, which the model is asked to answer."""
    answered = ("assistant", "system", "developer")
    count = sum(1 for _ in itertools.takewhile(lambda each: each.role not in answered, reversed(messages)))
    return range(len(messages) - count, len(messages))


def _with_pictures(content: Any) -> dict[str, Any]:
    """Content as text, and its pictures with their places, if there are any."""
    parts = with_pictures(content)
    if not isinstance(parts, list):
        return {"content": parts}
    text, pictures = "", []
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            pictures.append({"at": len(text)} | {name: part[name] for name in ("url", "name", "detail")})
    return {"content": text, "pictures": pictures}


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
