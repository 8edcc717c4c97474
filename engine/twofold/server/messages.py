"""The turns of a conversation: text only, and what they may carry besides."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

MAX_MESSAGES: Final = 2048


def _flatten_content(value: object) -> object:
    """A list of text parts becomes one text; any other kind of part is named in the error."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or "type" not in part:
            raise ValueError(
                f'part {index} of the content must be an object such as {{"type": "text", "text": "…"}}'
            )
        if part["type"] != "text":
            raise ValueError(
                f"part {index} of the content has type {str(part['type'])[:40]!r}; the model reads text only"
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {index} of the content needs a string in 'text'")
        texts.append(part["text"])
    return "".join(texts)


def _no_tools(value: Any) -> None:
    if value:
        raise ValueError("not supported: the model is not given tools; write the call and its result as text")


def _no_tool_role(value: str) -> str:
    if value in ("tool", "function"):
        _no_tools(value)
    return value


def _no_refusal(value: Any) -> None:
    if value:
        raise ValueError("not supported: put the text into content")


def _no_prefix(value: Any) -> None:
    if value:
        raise ValueError("not supported: send continue_final_message: true beside messages")


Text = Annotated[str, Field(max_length=16 * 1024 * 1024)]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
NoTools = Annotated[Any, AfterValidator(_no_tools)]


class Message(BaseModel):
    """One turn of a conversation. `developer` is OpenAI's newer name of `system`.

    Refused because the prompt would lack them in silence: calls of tools and their results, audio, refusals, and
    other servers' marks of an answer to be continued. Anything unknown is ignored.
    """

    role: Annotated[Role, AfterValidator(_no_tool_role)]
    content: Annotated[Text | None, BeforeValidator(_flatten_content)] = None
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: Text | None = None
    """Given to the template, like `name`; most read neither."""
    tool_calls: NoTools = None
    function_call: NoTools = None
    audio: Annotated[Any, AfterValidator(_no_refusal)] = None
    refusal: Annotated[Any, AfterValidator(_no_refusal)] = None
    prefix: Annotated[Any, AfterValidator(_no_prefix)] = None
    partial: Annotated[Any, AfterValidator(_no_prefix)] = None

    def for_template(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content or ""}
        for name in ("name", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        return message
