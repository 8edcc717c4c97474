"""Templates of each dialect's calls, for grammars: the inverse of the parsers.

$name is the tool's name, $args its arguments, $key a parameter's name, $number the call's; all else is literal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

ArgumentsKind = Literal["json", "tags", "python", "gemma"]
"""json: an object; tags: one per parameter; python: key=value; gemma: JSON, bare keys and marks around strings."""
_ANY_KEY: Final = r"[^\s<>\[\](){}\"'`,;=|]+"
_WORD: Final = r"[A-Za-z0-9_.-]+"


@dataclass(frozen=True)
class CallForm:
    """The calls of one answer: begin, call, between, call, …, end."""

    call: str
    begin: str = ""
    """Starts with one of the dialect's marks; empty: the answer begins with a call."""
    between: str = ""
    end: str = ""
    arguments: ArgumentsKind = "json"
    names: str = r"\S+"
    """Regular expression of the tool names that the form can express."""
    keys: str = _ANY_KEY
    """Regular expression of parameter names, outside JSON."""
    parameter: tuple[str, str, str] = ("", "", "")
    """Around a tag's value: before it, directly after it, and up to the next one. $text: whether the value is text."""
    line: str = ""
    """Between a non-text value and its end."""


_OBJECT: Final = '{"name": "$name", "arguments": $args}'
_CALLS, _CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
_CALLS_END, _CALL_END = "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"


def _hy_form(suffix: str) -> CallForm:
    return CallForm(
        f"<tool_call{suffix}>$name<tool_sep{suffix}>\n$args</tool_call{suffix}>\n",
        f"<tool_calls{suffix}>\n",
        end=f"</tool_calls{suffix}>",
        arguments="tags",
        keys=r"[^<>\n]+",
        parameter=(
            f"<arg_key{suffix}>$key</arg_key{suffix}>\n<arg_value{suffix}>",
            f"</arg_value{suffix}>",
            "\n",
        ),
    )


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
    "seed_oss": CallForm(
        "<function=$name>\n$args</function>\n</seed:tool_call>",
        "<seed:tool_call>\n",
        between="\n<seed:tool_call>\n",
        arguments="tags",
        parameter=("<parameter=$key>", "</parameter>", "\n"),
    ),
    "deepseek_v32": CallForm(
        '<｜DSML｜invoke name="$name">\n$args</｜DSML｜invoke>\n',
        "<｜DSML｜function_calls>\n",
        end="</｜DSML｜function_calls>",
        arguments="tags",
        parameter=('<｜DSML｜parameter name="$key" string="$text">', "</｜DSML｜parameter>", "\n"),
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
    "hy_v3": _hy_form(":opensource"),
    "hy_v3_preview": _hy_form(""),
    "solar_open": CallForm(
        "<|tool_call:begin|>$number<|tool_call:name|>$name<|tool_call:args|>$args<|tool_call:end|>",
        "<|tool_calls|>",
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
    "hunyuan_a13b": CallForm(_OBJECT, "<tool_calls>[", between=", ", end="]</tool_calls>"),
    "gemma4": CallForm(
        "call:$name{$args}<tool_call|>",
        "<|tool_call>",
        between="<|tool_call>",
        arguments="gemma",
        keys=r"[^:{}\[\],<\s]+",
    ),
}
_MISTRAL_SINCE_2025: Final = CallForm("$name[ARGS]$args", "[TOOL_CALLS]", between="[TOOL_CALLS]")
_PLACES: Final = re.compile(r"\$(name|args|key|number)")


def form_of(dialect: str, has_token: Callable[[str], bool]) -> CallForm:
    """The form that a model with these tokens was trained on."""
    if dialect == "mistral" and has_token("[ARGS]"):
        return _MISTRAL_SINCE_2025
    return FORMS[dialect]


def pieces(text: str) -> list[str]:
    """A form's text split at its placeholders, which have odd indices."""
    return _PLACES.split(text)
