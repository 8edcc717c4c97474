"""Arguments of tool calls. Custom tools take any text; the model sees each as a function with one text argument."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import from_json

_INPUT: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom_function(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`tool` as a function called `name`. Its grammar goes into the description and is not enforced."""
    form = tool.get("format")
    held = form.get("grammar", form) if isinstance(form, dict) else None
    definition = held.get("definition") if isinstance(held, dict) else None
    grammar = f"The input matches this grammar:\n{definition}" if isinstance(definition, str) else ""
    description = "\n\n".join(filter(None, [tool.get("description"), grammar]))
    return {"name": name, "description": description, "parameters": _INPUT}


def custom_arguments(text: str) -> str:
    """The function's arguments for a call with `text`."""
    return json.dumps({"input": text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input text of a custom tool's call; arguments in any other form are the text themselves."""
    try:
        held = parsed_so_far(arguments)["input"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return arguments
    return held if isinstance(held, str) else arguments


def parsed_so_far(arguments: str) -> Any:
    """Parse a call's arguments, which may be truncated: the members present, with the beginning of a cut text."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        pass
    try:
        return from_json(arguments, allow_partial="trailing-strings")
    except ValueError:  # half a surrogate pair, which a JSON text may escape
        return {}
