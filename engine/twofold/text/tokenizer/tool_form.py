"""The form of tool calls that a chat template expects in a conversation, determined by rendering one.

Templates differ and do not declare it. Most expect a call's arguments as an object, some as JSON text; some show a
call only in a message with null content; some show only the first of several calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from twofold.api.errors import RequestError

_NAMES: Final = ("look_up", "add_up")
_ID, _LONG_ID = "probing0", "call_probing-identifier_0"
_KEY, _VALUE, _RESULT = "probing_key", "probing_value", "probing_result"
_TOOL: Final = {
    "description": "A tool.",
    "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "A key."}}},
}

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]


@dataclass(frozen=True)
class ToolForm:
    """Form of tool calls in one template."""

    arguments_as_text: bool
    """Arguments are JSON text; else an object."""
    null_content: bool
    """Content of a message with only calls is null; else it is empty."""
    several: bool
    """All calls of a message are shown; else only the first."""
    short_ids: bool = False
    """Ids are nine letters and digits; others are refused."""
    shows_ids: bool = True
    """Ids are shown; else only the order pairs results with calls."""


def find_tool_form(render: Render) -> ToolForm | None:
    """The first form in which the template shows a call and its result; None if there is none."""
    for null_content in (False, True):
        for as_text in (False, True):
            form = ToolForm(as_text, null_content, several=True)
            one = _shown(render, 1, form)
            if one is not None:
                return ToolForm(
                    as_text,
                    null_content,
                    several=_shown(render, 2, form) is not None,
                    short_ids=_shown(render, 1, form, _LONG_ID) is None,
                    shows_ids=_ID in one,
                )
    return None


def _shown(render: Render, num_calls: int, form: ToolForm, id_prefix: str = _ID) -> str | None:
    """The part of the prompt that shows so many calls and their results; None if it does not show all of them."""
    arguments = {_KEY: _VALUE}
    calls = [
        {
            "id": f"{id_prefix}{number}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments) if form.arguments_as_text else arguments,
            },
        }
        for number, name in enumerate(_NAMES[:num_calls])
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": name, "content": f"{_RESULT}_{name}"}
        for call, name in zip(calls, _NAMES, strict=False)
    ]
    messages: list[Mapping[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None if form.null_content else "", "tool_calls": calls},
        *results,
    ]
    tools = [{"type": "function", "function": {"name": name, **_TOOL}} for name in _NAMES]
    try:
        # Occurrences in the tools' descriptions do not count.
        prompt = render(messages, tools).removeprefix(_common_prefix(render, messages, tools))
    except RequestError:
        return None
    names = _NAMES[:num_calls]
    if not all(name in prompt and f"{_RESULT}_{name}" in prompt for name in names):
        return None
    # JSON inside a JSON string, or an object in Python's notation, is the wrong form.
    written = prompt.count(_VALUE)
    wrong = prompt.count(f'\\"{_KEY}') + prompt.count(f"'{_KEY}'")
    return prompt if written >= num_calls and not wrong else None


def _common_prefix(
    render: Render, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> str:
    """Common prefix of the prompt and the prompt with only the question."""
    whole, question = render(messages, tools), render(messages[:1], tools)
    length = next((at for at, (one, two) in enumerate(zip(whole, question, strict=False)) if one != two), 0)
    return whole[: length or min(len(whole), len(question))]
