"""Converts the items and tools of /v1/responses to the messages and functions of a chat."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from twofold.server.http.errors import wrong_field
from twofold.server.openai.custom_tools import custom_arguments, custom_function
from twofold.server.responses.schemas import IGNORED_TOOLS, InputItem, ResponsesRequest
from twofold.text.conversation.content import readable, with_pictures
from twofold.text.conversation.repairs import report

_CALLS: Final = ("function_call", "custom_tool_call")
_OUTPUTS: Final = ("function_call_output", "custom_tool_call_output")
_SEALED: Final = "twofold1:"
"""Prefix of `encrypted_content` written by this server."""


@dataclass(frozen=True)
class OfferedTool:
    """A tool under the client's names; the model knows it by a single name."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True)
class Offer:
    """The tools offered to the model."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """Tools in the chat's format."""
    by_name: dict[str, OfferedTool] = field(default_factory=dict)
    given: list[dict[str, Any]] = field(default_factory=list)
    """Tools as in the request, without the ignored ones."""

    def tool(self, name: str) -> OfferedTool:
        """The tool by the model's name; an unknown name is a function."""
        return self.by_name.get(name, OfferedTool("function", name))


def offer_of(tools: Sequence[dict[str, Any]]) -> Offer:
    """Build the offer. ApiError 400 if all offered tools are ones that cannot run here, and for two tools of one
    name."""
    offer = Offer(given=[tool for tool in tools if tool["type"] not in IGNORED_TOOLS])
    if tools and not offer.given:
        raise wrong_field(
            "tools",
            f"the server runs no tools of type {tools[0]['type']!r}; offer functions, beside which such tools are "
            "ignored, or leave them out",
        )
    for tool in offer.given:
        namespace = tool["name"] if tool["type"] == "namespace" else None
        for each in tool["tools"] if namespace else [tool]:
            name = model_name(each["name"], namespace)
            if name in offer.by_name:
                raise wrong_field("tools", f"two are called {name[:256]!r}; rename one")
            offer.by_name[name] = OfferedTool(each["type"], each["name"], namespace)
            offer.functions.append({"type": "function", "function": _function(each, name)})
    return offer


def model_name(name: str, namespace: str | None) -> str:
    """The model's name for a tool of a namespace."""
    if not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def _function(tool: dict[str, Any], name: str) -> dict[str, Any]:
    if tool["type"] == "function":
        described = {
            key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None
        }
        return {"name": name} | described
    return custom_function(tool, name)


def tool_choice_of(body: ResponsesRequest, offer: Offer) -> tuple[list[dict[str, Any]], Any]:
    """The callable functions and the chat's tool_choice. ApiError 400 for a choice that is not offered."""
    choice = body.tool_choice
    if not isinstance(choice, dict):
        return offer.functions, choice
    kind, mode = choice.get("type"), choice.get("mode")
    named = choice.get("tools") if kind == "allowed_tools" else [choice]
    if kind not in ("allowed_tools", "function", "custom") or not isinstance(named, list):
        raise wrong_field(
            "tool_choice", "send auto, none, required, a function, or allowed_tools with a list of tools"
        )
    names = {
        model_name(str(tool.get("name")), tool.get("namespace")) for tool in named if isinstance(tool, dict)
    }
    unknown = sorted(names - offer.by_name.keys())
    if unknown:
        raise wrong_field("tool_choice", f"{unknown[0][:256]!r} is not among the offered tools")
    if kind == "allowed_tools":
        return [function for function in offer.functions if function["function"]["name"] in names], mode
    return offer.functions, {"type": "function", "function": {"name": names.pop()}}


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation as chat messages: the items of one answer are one message."""
    turns = [{"role": "system", "content": body.instructions}] if body.instructions else []
    for item in body.items:
        _add(turns, item)
    return turns


def _add(turns: list[dict[str, Any]], item: InputItem) -> None:
    last = turns[-1] if turns else {}
    answer = last if last.get("role") == "assistant" else None
    if item.kind == "message":
        if item.role == "assistant" and answer is not None and not answer.keys() & {"content", "tool_calls"}:
            answer["content"] = item.content
        else:
            turns.append({"role": item.role, "content": item.content})
    elif item.kind == "reasoning":
        sealed_text = opened(item.encrypted_content or "")
        thinking = readable(item.content) or sealed_text or readable(item.summary)
        if thinking:
            turns.append({"role": "assistant", "reasoning_content": thinking})
    elif item.kind.endswith("_call") and (item.call_id or item.kind in _CALLS):
        if answer is None:
            turns.append(answer := {"role": "assistant"})
        answer.setdefault("tool_calls", []).append(_call(item))
    elif item.kind.endswith("_output") and (item.call_id or item.kind in _OUTPUTS):
        # The parts of an output are texts of their own, such as the pages of a file.
        turns.append({"role": "tool", "tool_call_id": item.call_id, "content": with_pictures(item.output)})
    elif item.kind != "additional_tools":
        report("items of other servers")


def _call(item: InputItem) -> dict[str, Any]:
    name = model_name(item.name or item.kind.removesuffix("_call"), item.namespace)
    arguments: Any = item.arguments if item.action is None else item.action
    if item.kind == "custom_tool_call":
        arguments = custom_arguments(item.input or "")
    return {"id": item.call_id, "function": {"name": name, "arguments": arguments}}


def sealed(thinking: str) -> str:
    """Encode thinking for `encrypted_content`, by which agents that do not show it send it back. This is no secrecy:
    the
    same client has it in the clear."""
    return _SEALED + base64.b64encode(thinking.encode()).decode("ascii")


def opened(text: str) -> str:
    """Decode `sealed` thinking; empty for the content of another server."""
    if not text.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
