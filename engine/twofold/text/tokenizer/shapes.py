"""Whether a chat template shows a conversation of given kinds of messages, determined by rendering one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from twofold.api.errors import RequestError
from twofold.text.tokenizer.tool_form import ToolForm

Kind = Literal["system", "user", "assistant", "call", "result"]
"""A message's kind; a call is an assistant's message with one tool call, a result the tool's message for it."""
RenderOutcome = Literal["shown", "left out", "refused"]
"""Result of rendering a conversation: the template renders all of it, leaves out a part, or raises an error."""

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str]
_TOOL: Final = "look_up"
_TOOLS: Final = (
    {"type": "function", "function": {"name": _TOOL, "description": "", "parameters": {"type": "object"}}},
)


def shown(render: Render, shape: Sequence[Kind], form: ToolForm | None) -> RenderOutcome:
    """How the template renders messages of these kinds; `form`: its form of tool calls."""
    has_calls = "call" in shape or "result" in shape
    if has_calls and form is None:
        return "refused"
    texts = [f"probe{number}x" for number in range(len(shape))]
    messages = [
        _message(kind, number, text, form)
        for number, (kind, text) in enumerate(zip(shape, texts, strict=True))
    ]
    try:
        prompt = render(messages, _TOOLS if has_calls else None)
    except RequestError:
        return "refused"
    return "shown" if all(text in prompt for text in texts) else "left out"


def _message(kind: Kind, number: int, text: str, form: ToolForm | None) -> dict[str, Any]:
    if kind == "result":
        # The id of the call before it, if there is one.
        return {"role": "tool", "tool_call_id": f"probing0{number - 1}", "name": _TOOL, "content": text}
    if kind != "call" or form is None:
        return {"role": kind, "content": text}
    arguments = {"key": text}
    function = {"name": _TOOL, "arguments": json.dumps(arguments) if form.arguments_as_text else arguments}
    call = {"id": f"probing0{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None if form.null_content else "", "tool_calls": [call]}
