"""Messages of a conversation: text, tool calls, tool results and their optional fields."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from twofold.api.errors import RequestError
from twofold.server.http.bodies import refused
from twofold.server.openai.custom_tools import custom_arguments

if TYPE_CHECKING:
    # The process that parses large bodies imports this file and needs no tokenizer.
    from twofold.server.bridge.protocol import ServingTokenizer
    from twofold.text.tokenizer import ToolForm

MAX_MESSAGES: Final = 2048
MAX_CALLS: Final = 128
"""Most tool calls of one message."""


def flattened(*kinds: str) -> BeforeValidator:
    """Joins a list of text parts of these kinds into one text; the error names any other kind of part."""

    def join(value: object) -> object:
        if not isinstance(value, list):
            return value
        texts: list[str] = []
        for index, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(part, dict) or kind is None:
                raise ValueError(
                    f'part {index} must be an object such as {{"type": "{kinds[0]}", "text": "…"}}'
                )
            if kind not in kinds:
                raise ValueError(f"part {index} has type {str(kind)[:40]!r}; the model reads text only")
            text = part.get("refusal" if kind == "refusal" else "text")
            if not isinstance(text, str):
                raise ValueError(f"part {index} needs a string in 'text'")
            texts.append(text)
        return "".join(texts)

    return BeforeValidator(join)


def _no_function_role(value: str) -> str:
    if value == "function":
        raise ValueError("not supported: send role 'tool', which replaced it")
    return value


_NoPrefix = refused("send continue_final_message: true beside messages")
_NoRefusal = refused("put the text into content")
Text = Annotated[str, Field(max_length=16 * 1024 * 1024)]
Role = Annotated[str, Field(min_length=1, max_length=64)]
KNOWN_ROLES: Final = frozenset(("system", "developer", "user", "assistant", "tool"))
Name = Annotated[str, Field(min_length=1, max_length=256)]


class CalledFunction(BaseModel):
    name: Name
    arguments: Text | None = None
    """JSON text of an object."""

    def for_template(self, where: str, form: ToolForm) -> dict[str, Any]:
        """The call for the chat template. RequestError for arguments that are not an object."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError(
                f"{where}.function.arguments: expected the JSON text of an object, unchanged from the answer",
                param=f"{where}.function.arguments",
            )
        return {
            "name": self.name,
            "arguments": (self.arguments or "{}") if form.arguments_as_text else arguments,
        }


class ToolCall(BaseModel):
    """A tool call of an earlier answer. A call of a custom tool is converted to the function that the model knows."""

    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _custom_as_function(cls, value: Any) -> Any:
        custom = value.get("custom") if isinstance(value, dict) and value.get("type") == "custom" else None
        if not isinstance(custom, dict) or not isinstance(custom.get("input"), str):
            return value
        function = {"name": custom.get("name"), "arguments": custom_arguments(custom["input"])}
        return {"id": value.get("id"), "type": "function", "function": function}


class Message(BaseModel):
    """One message of a conversation. `developer` is OpenAI's newer name of `system`; other roles depend on the
    template.

    Fields that the prompt would silently lack are refused: the older forms of calls, audio, refusals, and other
    servers' marks of an answer to be continued. Unknown fields are ignored.
    """

    role: Annotated[Role, AfterValidator(_no_function_role)]
    content: Annotated[Text | None, flattened("text")] = None
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: Text | None = None
    """Passed to the template, like `name`; not all templates use them."""
    reasoning: Text | None = None
    """Other name of `reasoning_content`."""
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    function_call: refused("send tool_calls, which replaced it") = None  # type: ignore[valid-type]
    audio: _NoRefusal = None  # type: ignore[valid-type]
    refusal: _NoRefusal = None  # type: ignore[valid-type]
    prefix: _NoPrefix = None  # type: ignore[valid-type]
    partial: _NoPrefix = None  # type: ignore[valid-type]

    def for_template(self, where: str, form: ToolForm | None, *, reads_thinking: bool) -> dict[str, Any]:
        """The message for the chat template. RequestError for calls that the template (`form`) does not support."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
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
        if not self.tool_calls and role != "tool":
            return message
        param = f"{where}.tool_calls" if self.tool_calls else f"{where}.role"
        if form is None or (self.tool_calls and role != "assistant"):
            problem = "this model's chat template renders no tool calls and no results; write them as text"
            if form is not None:
                problem = "only an assistant's message may have tool calls; move them there"
            raise RequestError(f"{param}: {problem}", param=param)
        if not self.tool_calls:
            return message
        if len(self.tool_calls) > 1 and not form.several:
            raise RequestError(
                f"{param}: this model's chat template renders one tool call per message, not {len(self.tool_calls)}; "
                "send each in a message of its own, followed by its result",
                param=param,
            )
        message["tool_calls"] = [
            {
                "id": call.id or f"call_{number}",
                "type": "function",
                "function": call.function.for_template(f"{param}[{number}]", form),
            }
            for number, call in enumerate(self.tool_calls)
        ]
        if form.null_content and not self.content:
            message["content"] = None
        return message


def messages_for_template(messages: Sequence[Message], tokenizer: ServingTokenizer) -> list[dict[str, Any]]:
    """The conversation for the model's template. RequestError as in `Message.for_template`."""
    holds_calls = any(message.tool_calls or message.role == "tool" for message in messages)
    form = tokenizer.tool_form if holds_calls else None
    reads_thinking = "message.thinking" in (tokenizer.chat_template or "")
    return [
        message.for_template(f"messages[{number}]", form, reads_thinking=reads_thinking)
        for number, message in enumerate(messages)
    ]
