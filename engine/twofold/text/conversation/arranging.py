"""Arranges a conversation for one chat template: it may refuse or leave out roles in some places.

Each two neighbouring messages that not every template renders are tried on the template in a small conversation of
their kinds. If it does not show them, they are joined, turned into the user's, or separated by a placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from twofold.api.errors import RequestError, TemplateLimitExceededError
from twofold.text.conversation.calls import (
    Turn,
    as_text,
    holds_calls,
    in_form,
    no_result,
    paired,
    result_as_user,
)
from twofold.text.conversation.content import has_placeholder
from twofold.text.conversation.repairs import report
from twofold.text.tokenizer import ToolForm
from twofold.text.tokenizer.shapes import Kind, RenderOutcome


class Template(Protocol):
    """A model's chat template."""

    @property
    def tool_form(self) -> ToolForm | None: ...

    def shows(self, *shape: Kind) -> RenderOutcome: ...


Shows = Callable[..., RenderOutcome]

_USUAL: Final = frozenset(
    (
        ("", "user"),
        ("system", "user"),
        ("user", "assistant"),
        ("user", "call"),
        ("call", "result"),
        ("result", "result"),
        ("result", "assistant"),
        ("result", "call"),
        ("assistant", "user"),
        ("user", ""),
        ("assistant", ""),
        ("result", ""),
    )
)
"""Neighbours that every template renders; "" is the conversation's begin or end."""
_BEFORE: Final[dict[str, tuple[Kind, ...]]] = {
    "": (),
    "system": ("system",),
    "user": ("user",),
    "assistant": ("user", "assistant"),
    "call": ("user", "call"),
    "result": ("user", "call", "result"),
}
"""Kind → a usual conversation that ends with it."""
_AFTER: Final[dict[str, tuple[Kind, ...]]] = {
    "": (),
    "system": ("user",),
    "user": ("assistant", "user"),
    "assistant": ("user",),
    "call": ("result", "assistant", "user"),
    "result": ("assistant", "user"),
}
"""Kind → what usually follows it, up to a user's message."""
_BEGIN, _NO_ANSWER = "[the conversation begins]", "[no answer]"


def rendered(
    turns: Sequence[Turn], template: Template, render: Callable[[list[Turn]], str]
) -> tuple[list[Turn], str]:
    """The conversation as the template takes it, and its prompt. RequestError if the template refuses every form."""
    given = arranged(turns, template)
    try:
        return given, render(given)
    except TemplateLimitExceededError:
        raise
    except RequestError as refusal:
        simple = _in_order(as_text(paired(turns)), lambda *shape: "refused")
        try:
            prompt = render(simple)
        except RequestError:
            raise refusal from None
        report("plain turns")
        return simple, prompt


def arranged(turns: Sequence[Turn], template: Template) -> list[Turn]:
    """The conversation as the template probably renders it. A conversation of usual form is unchanged."""
    if any(has_placeholder(turn["content"]) for turn in turns):
        report("unreadable content")
    given = paired(turns)
    if holds_calls(given):
        form = template.tool_form
        if form is None:
            report("calls as text")
            given = as_text(given)
        else:
            given = in_form(given, form)
    return _in_order(given, template.shows)


def _in_order(turns: Sequence[Turn], shows: Shows) -> list[Turn]:
    made: list[Turn] = []
    for turn in turns:
        _append(made, turn, shows)
    _end(made, shows)
    return made


def _append(made: list[Turn], turn: Turn, shows: Shows) -> None:
    """Append a turn, repaired as far as its place in front of it demands."""
    while not _can_follow(last := _kind(made[-1]) if made else "", kind := _kind(turn), shows):
        if kind == "system" and last != "system":
            report("system as user")
            turn = turn | {"role": "user"}
        elif kind == "result":
            report("result as user")
            turn = result_as_user(turn)
        elif last == kind or {last, kind} == {"assistant", "call"}:
            report("joined messages")
            made[-1] = _joined(made[-1], turn)
            return
        else:
            report("missing message")
            made.extend(_missing(made[-1] if made else None))
    made.append(turn)


def _end(made: list[Turn], shows: Shows) -> None:
    """Repair the end of a conversation that has no question, or a call without a result."""
    last = _kind(made[-1])
    if _can_follow(last, "", shows):
        return
    if last == "system":
        report("system as user")
        made.append(made.pop() | {"role": "user"})
    else:
        report("missing message")
        made.extend(_missing(made[-1]))


def _can_follow(last: str, kind: str, shows: Shows) -> bool:
    """Whether the template renders a message of this kind after the last one."""
    if (last, kind) in _USUAL or not {last, kind} <= _BEFORE.keys():
        return True
    shown = shows(*_BEFORE[last], *([kind] if kind else []), *_AFTER[kind])
    # Whether the first system message is shown is the template's decision.
    return shown == "shown" or (shown == "left out" and (last, kind) == ("", "system"))


def _missing(last: Turn | None) -> list[Turn]:
    """Placeholders for what the template requires after `last`."""
    if last is None or last["role"] == "system":
        return [{"role": "user", "content": _BEGIN}]
    if not last.get("tool_calls"):
        return [{"role": "assistant", "content": _NO_ANSWER}]
    return [no_result(call) for call in last["tool_calls"]]


def _joined(one: Turn, other: Turn) -> Turn:
    joined = one | {name: value for name, value in other.items() if name not in one}
    for name, between in (
        ("content", "\n\n"),
        ("reasoning_content", "\n"),
        ("reasoning", "\n"),
        ("thinking", "\n"),
    ):
        if name in joined:
            joined[name] = between.join(filter(None, (one.get(name), other.get(name)))) or one.get(name)
    if one.get("tool_calls") or other.get("tool_calls"):
        joined["tool_calls"] = [*(one.get("tool_calls") or ()), *(other.get("tool_calls") or ())]
    return joined


def _kind(turn: Turn) -> str:
    """The kind of a message; of a role of the template's own, the role."""
    if turn.get("tool_calls"):
        return "call"
    return "result" if turn["role"] == "tool" else turn["role"]
