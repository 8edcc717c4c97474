"""Regular expressions of texts that a string schema allows, for forms that write texts without quotes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

_MAX_CHARS: Final = 4096
"""Longest bound on a text's length that is enforced: every character takes a state of the grammar."""
_DATE: Final = "[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_TIME: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_DAYS: Final = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_HOURS: Final = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_LABEL: Final = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM: Final = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+",
}
TEXT_KEYWORDS: Final = ("minLength", "maxLength", "pattern", "format")


def text_patterns(schema: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Regular expressions that the whole text must match, and keywords of the schema that none expresses.

    schema: as `enforceable_schema` makes it.
    """
    patterns: list[str] = []
    left: list[str] = []
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if most is not None and least <= most <= _MAX_CHARS:
        patterns.append(f"(?s:.{{{least},{most}}})")
    elif least <= _MAX_CHARS:
        patterns += [f"(?s:.{{{least},}})"] if least else []
        left += ["maxLength"] if most is not None else []
    else:
        left.append("minLength")
    if "pattern" in schema:
        whole = whole_pattern(schema["pattern"])
        (patterns if whole is not None else left).append(whole or "pattern")
    if "format" in schema:
        whole = _FORMATS.get(schema["format"])
        (patterns if whole is not None else left).append(whole or "format")
    return patterns, left


def whole_pattern(pattern: str) -> str | None:
    """The pattern of all texts that contain a match; None: it has an anchor in its middle."""
    full_patterns = []
    for branch in _branches(pattern):
        inner = branch.removeprefix("^")
        begin = "" if inner != branch else "(?s:.*)"
        end = "(?s:.*)"
        if re.search(r"(?<!\\)(?:\\\\)*\$$", inner) is not None:
            inner, end = inner[:-1], ""
        if any(char in "^$" for char in _outside_classes(inner)):
            return None
        full_patterns.append(f"{begin}(?:{inner}){end}")
    whole = "|".join(full_patterns)
    return whole.replace("\n", r"\n").replace("\r", r"\r")


def _branches(pattern: str) -> list[str]:
    """The alternatives at the top of a pattern."""
    branches, depth, start = [], 0, 0
    for at, char in _marks(pattern):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "|" and depth == 0:
            branches.append(pattern[start:at])
            start = at + 1
    return [*branches, pattern[start:]]


def _outside_classes(pattern: str) -> str:
    return "".join(char for _, char in _marks(pattern))


def _marks(pattern: str) -> Iterator[tuple[int, str]]:
    """Characters with their places that are neither escaped nor in a class such as [a|b]."""
    in_class = is_escaped = False
    for at, char in enumerate(pattern):
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        else:
            yield at, char
