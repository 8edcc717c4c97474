"""`tools` and `tool_choice` of a chat request, in OpenAI's format."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import AfterValidator

from twofold.server.openai.custom_tools import custom_function
from twofold.text.schemas.normal_form import SchemaError, normal_parameters

_TOOL_NAME: Final = re.compile(r"[\w.:/@-]{1,256}")
_KINDS: Final = ("function", "custom")


def _is_tool(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in _KINDS:
        raise ValueError(f"has type {str(kind)[:40]!r}; only functions and custom tools are supported")
    held = tool.get(kind)
    if not isinstance(held, dict):
        raise ValueError(f"needs an object in {kind!r}")
    name = held.get("name")
    if not isinstance(name, str) or _TOOL_NAME.fullmatch(name) is None:
        raise ValueError(f"needs a {kind}.name of 1 to 256 letters, digits and _ . : / @ -")
    if not isinstance(held.get("description"), str | None):
        raise ValueError(f"{kind}.description must be text")
    if not isinstance(held.get("strict"), bool | None):
        raise ValueError(f"{kind}.strict must be true or false")
    given = {key: value for key, value in held.items() if value is not None}
    if kind == "function" and "parameters" in given:
        try:
            given["parameters"] = normal_parameters(given["parameters"])
        except SchemaError as error:
            raise ValueError(f"the tool {name!r}: {error}") from None
    return tool | {kind: given}


Tool = Annotated[dict[str, Any], AfterValidator(_is_tool)]


def tool_name(tool: dict[str, Any]) -> str:
    return str(tool[tool["type"]]["name"])


def as_function(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool for the chat template: a function unchanged, a custom tool as a function with one text argument."""
    if tool["type"] == "function":
        return tool
    return {"type": "function", "function": custom_function(tool["custom"], tool_name(tool))}


def with_parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """The function with the keywords of its parameters that some chat templates read without looking for them."""
    function = tool["function"]
    whole = {"type": "object", "properties": {}} | function.get("parameters", {})
    return tool | {"function": function | {"parameters": whole}}


@dataclass(frozen=True)
class Choice:
    """A parsed `tool_choice`."""

    mode: str
    """auto, none or required."""
    name: str | None = None
    """Name of the only tool that may be called."""
    allowed: frozenset[str] | None = None
    """Names of the tools offered to the model; None: all."""

    @classmethod
    def of(cls, given: str | dict[str, Any] | None) -> Choice:
        """Parse a `tool_choice`. ValueError for any other form."""
        if given is None or given in ("none", "auto", "required"):
            return cls(str(given or "auto"))
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(given, dict) and kind in _KINDS and (name := _name(given)) is not None:
            return cls("required", name)
        held = given.get("allowed_tools", given) if isinstance(given, dict) else None
        if kind == "allowed_tools" and isinstance(held, dict) and held.get("mode") in ("auto", "required"):
            tools = held.get("tools")
            names = [_name(tool) for tool in tools] if isinstance(tools, list) else [None]
            if all(name is not None for name in names):
                return cls(held["mode"], allowed=frozenset(name for name in names if name is not None))
        raise ValueError(
            'must be \'auto\', \'none\', \'required\', {"type": "function", "function": {"name": …}} or '
            '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": […]}}'
        )


def _name(tool: Any) -> str | None:
    """Name of the tool in a choice, which the Responses API's form has beside the type."""
    if not isinstance(tool, dict) or tool.get("type") not in _KINDS:
        return None
    held = tool.get(tool["type"], tool)
    name = held.get("name") if isinstance(held, dict) else None
    return name if isinstance(name, str) else None
