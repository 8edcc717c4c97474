"""Converts the items and tools of /v1/responses to the messages and functions of a chat."""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from twofold.api.errors import RequestError
from twofold.server.bridge.protocol import ServingTokenizer
from twofold.server.http.errors import wrong_field
from twofold.server.openai.custom_tools import custom_arguments, custom_function
from twofold.server.responses.schemas import IGNORED_TOOLS, InputItem, ResponsesRequest

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
        told = {
            key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None
        }
        return {"name": name} | told
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


def messages_of(body: ResponsesRequest, tokenizer: ServingTokenizer) -> list[dict[str, Any]]:
    """The conversation as chat messages that this model's template accepts.

    One answer's items are one message. Agents do not know the template: they send several system messages, at the
    beginning and later, and several user messages in a row. Messages that the template refuses are joined or become
    user messages.
    """
    turns = [{"role": "system", "content": body.instructions}] if body.instructions else []
    for item in body.items:
        _add(turns, item)
    late = [turn for turn in turns[1:] if turn["role"] == "system"]
    if late and not _shows(tokenizer, "user", "assistant", "system", "user"):
        for turn in late:
            turn["role"] = "user"
    in_a_row = any(one["role"] == two["role"] == "user" for one, two in itertools.pairwise(turns))
    if in_a_row and not _shows(tokenizer, "user", "user"):
        turns = _joined(turns)
    form = tokenizer.tool_form
    return _one_call_each(turns) if form is not None and not form.several else turns


def _add(turns: list[dict[str, Any]], item: InputItem) -> None:
    last = turns[-1] if turns else {}
    answer = last if last.get("role") == "assistant" else None
    if item.kind == "message":
        role = "system" if item.role == "developer" else item.role
        if role == "system" and len(turns) == 1 and last["role"] == "system":
            last["content"] += f"\n\n{item.content}"
        elif role == "assistant" and answer is not None and not answer.keys() & {"content", "tool_calls"}:
            answer["content"] = item.content
        else:
            turns.append({"role": role, "content": item.content})
    elif item.kind == "reasoning":
        thinking = item.content or opened(item.encrypted_content or "") or item.summary
        if thinking:
            turns.append({"role": "assistant", "reasoning_content": thinking})
    elif item.kind in ("function_call", "custom_tool_call"):
        if answer is None:
            turns.append(answer := {"role": "assistant"})
        arguments = item.arguments or "{}"
        if item.kind == "custom_tool_call":
            arguments = custom_arguments(item.input or "")
        name = model_name(item.name or "", item.namespace)
        call = {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        answer.setdefault("tool_calls", []).append(call)
    elif item.kind in ("function_call_output", "custom_tool_call_output"):
        turns.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})


def _joined(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join consecutive user messages into one."""
    joined: list[dict[str, Any]] = []
    for turn in turns:
        if joined and joined[-1]["role"] == turn["role"] == "user":
            joined[-1]["content"] += f"\n\n{turn['content']}"
        else:
            joined.append(turn)
    return joined


def _one_call_each(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that render one call per message: each call directly followed by its output."""
    outputs = {turn["tool_call_id"]: turn for turn in turns if turn["role"] == "tool"}
    split: list[dict[str, Any]] = []
    placed: set[str] = set()
    for turn in turns:
        calls = turn.get("tool_calls", ())
        if len(calls) < 2:
            if turn.get("tool_call_id") not in placed:
                split.append(turn)
            continue
        for number, call in enumerate(calls):
            split.append((turn if number == 0 else {"role": "assistant"}) | {"tool_calls": [call]})
            if call["id"] in outputs:
                split.append(outputs[call["id"]])
                placed.add(call["id"])
    return split


def _shows(tokenizer: ServingTokenizer, *roles: str) -> bool:
    """Whether the template accepts messages of these roles and renders all of them."""
    texts = [f"probe{number}" for number in range(len(roles))]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    try:
        rendered = tokenizer.apply_chat_template(messages)
    except RequestError:
        return False
    return all(text in rendered for text in texts)


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
