"""How each dialect writes a call, for grammars: the other direction of the parsers beside it.

$name is the tool's name, $args its arguments, $key a parameter's name, $number the call's; all else stands as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

ArgumentsKind = Literal["json", "tags", "python", "gemma"]
"""An object; a tag for each parameter; key=value; JSON with bare keys and marks around strings."""
_ANY_KEY: Final = r"[^\s<>\[\](){}\"'`,;=|]+"
_WORD: Final = r"[A-Za-z0-9_.-]+"


@dataclass(frozen=True)
class CallForm:
    """One answer's calls: begin, call, between, call, …, end."""

    call: str
    begin: str = ""
    """Starts with one of the dialect's marks; empty: a call is the answer's first word."""
    between: str = ""
    end: str = ""
    arguments: ArgumentsKind = "json"
    names: str = r"\S+"
    """Regular expression of the tools' names that can be written."""
    keys: str = _ANY_KEY
    """The same of the parameters', where they do not stand in JSON."""
    parameter: tuple[str, str, str] = ("", "", "")
    """Around a tag's value: before, right behind, and up to the next."""
    line: str = ""
    """Between a value that is no free text and its end."""


_OBJECT: Final = '{"name": "$name", "arguments": $args}'
_CALLS, _CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
_CALLS_END, _CALL_END = "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"

FORMS: Final = {
    "hermes": CallForm(
        _OBJECT, "<tool_call>\n", between="\n</tool_call>\n<tool_call>\n", end="\n</tool_call>"
    ),
    "qwen3_coder": CallForm(
        "<function=$name>\n$args</function>\n</tool_call>",
        "<tool_call>\n",
        between="\n<tool_call>\n",
        arguments="tags",
        parameter=("<parameter=$key>\n", "</parameter>", "\n"),
        line="\n",
    ),
    "deepseek_v3": CallForm(
        "function<｜tool▁sep｜>$name\n```json\n$args\n```",
        begin=_CALLS + _CALL,
        between=f"{_CALL_END}\n{_CALL}",
        end=_CALL_END + _CALLS_END,
    ),
    "deepseek_v31": CallForm(
        "$name<｜tool▁sep｜>$args",
        begin=_CALLS + _CALL,
        between=_CALL_END + _CALL,
        end=_CALL_END + _CALLS_END,
    ),
    "glm45": CallForm(
        "$name\n$args</tool_call>",
        "<tool_call>",
        between="\n<tool_call>",
        arguments="tags",
        keys=r"[^<>\n]+",
        parameter=("<arg_key>$key</arg_key>\n<arg_value>", "</arg_value>", "\n"),
    ),
    "glm47": CallForm(
        "$name$args</tool_call>",
        "<tool_call>",
        between="<tool_call>",
        arguments="tags",
        keys=r"[^<>\n]+",
        parameter=("<arg_key>$key</arg_key><arg_value>", "</arg_value>", ""),
    ),
    "mistral": CallForm(_OBJECT, "[TOOL_CALLS][", between=", ", end="]"),
    "kimi_k2": CallForm(
        "functions.$name:$number<|tool_call_argument_begin|>$args<|tool_call_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>",
        between="<|tool_call_begin|>",
        end="<|tool_calls_section_end|>",
    ),
    "minimax_m2": CallForm(
        '<invoke name="$name">\n$args</invoke>\n',
        "<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        arguments="tags",
        parameter=('<parameter name="$key">', "</parameter>", "\n"),
    ),
    "llama4_json": CallForm('{"name": "$name", "parameters": $args}', between="; "),
    "llama4_pythonic": CallForm(
        "$name($args)", "[", between=", ", end="]", arguments="python", names=_WORD, keys=_WORD
    ),
    "lfm2": CallForm(
        "$name($args)",
        "<|tool_call_start|>[",
        between=", ",
        end="]<|tool_call_end|>",
        arguments="python",
        names=_WORD,
        keys=_WORD,
    ),
    "granite": CallForm(_OBJECT, "<|tool_call|>[", between=", ", end="]"),
    "gemma4": CallForm(
        "call:$name{$args}<tool_call|>",
        "<|tool_call>",
        between="<|tool_call>",
        arguments="gemma",
        keys=r"[^:{}\[\],<\s]+",
    ),
}  # fmt: skip
_MISTRAL_SINCE_2025: Final = CallForm("$name[ARGS]$args", "[TOOL_CALLS]", between="[TOOL_CALLS]")
_PLACES: Final = re.compile(r"\$(name|args|key|number)")


def form_of(dialect: str, has_token: Callable[[str], bool]) -> CallForm:
    """The one that a model with these tokens was trained on."""
    if dialect == "mistral" and has_token("[ARGS]"):
        return _MISTRAL_SINCE_2025
    return FORMS[dialect]


def pieces(text: str) -> list[str]:
    """A form's text cut at its places, which are at odd numbers."""
    return _PLACES.split(text)
