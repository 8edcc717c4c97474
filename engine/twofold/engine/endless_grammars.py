"""Detects endless grammars: no finite answer matches them, so a model would write until it is cut off.

llguidance accepts them because every prefix has a continuation. A grammar that this module cannot parse counts as
finite.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from twofold.text.schemas.references import resolved

_MAX_STEPS: Final = 20_000
_ENDLESS: Final = "<endless>"
"""A rule name that no grammar can contain."""
_TOKEN: Final = re.compile(
    r"""(?P<skip>[ \t\r]+|//[^\n]*|\#[^\n]*)|(?P<line>\n)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?(?:\s*\.\.\s*"(?:\\.|[^"\\\n])*")?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^>\s]+>|@[\w.-]+)
    |(?P<json>%(?:json|regex)\b)|(?P<directive>%[^\n]*)
    |(?P<rule>^[?!]*[A-Za-z_][\w-]*(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:(?!:))
    |(?P<name>[A-Za-z_][\w-]*)|(?P<maybe>\?|\*|\{0?,[^}\n]*\}|\{0\}|~\s*0(?:\s*\.\.\s*\d+)?)
    |(?P<again>\+|\{[^}\n]*\}|~\s*\d+(?:\s*\.\.\s*\d+)?)|(?P<mark>[|()\[\]~&])|(?P<arrow>->\s*\w+)""",
    re.VERBOSE | re.MULTILINE,
)


def is_endless_lark(text: str) -> bool:
    """Whether no finite text can be derived from `start`."""
    try:
        rules = _rules(text)
    except ValueError:
        return False
    finite: set[str] = set()
    while True:
        more = {name for name, body in rules.items() if name not in finite and _ends(body, rules, finite)}
        if not more:
            return "start" in rules and "start" not in finite
        finite |= more


def _rules(text: str) -> dict[str, list[str]]:
    """Tokens of each rule: names, punctuation, ? and + for repetition, and "" for a terminal."""
    rules: dict[str, list[str]] = {_ENDLESS: [_ENDLESS]}
    body: list[str] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"no token at {at}")
        at, kind = found.end(), found.lastgroup
        if kind == "json":
            value, size = json.JSONDecoder().raw_decode(text[at:].lstrip())
            at = len(text) - len(text[at:].lstrip()) + size
            body.append(_ENDLESS if is_endless_schema(value) else "")
        elif kind == "rule":
            body = rules.setdefault(re.sub(r"[.\[:\s].*", "", found[0].lstrip("?!")), [])
            if body:
                raise ValueError("a rule is there twice")
        elif kind in ("text", "name", "maybe", "again", "mark"):
            body.append({"text": "", "maybe": "?", "again": "+"}.get(kind, found[0]))
    return rules


def _ends(body: list[str], rules: Mapping[str, list[str]], finite: set[str]) -> bool:
    """Whether one alternative of `body` consists of finite items. Never raises ValueError: an unbalanced body is
    finite."""
    stack: list[tuple[bool, bool]] = []
    any_choice, choice = False, True
    item = True
    for part in [*body, "|"]:
        if part == "?":
            item = True
            continue
        if part in ("+", "~", "&"):
            continue
        if part in ("(", "["):
            stack.append((any_choice, choice and item))
            any_choice, choice, item = False, True, True
        elif part in (")", "]"):
            inner = any_choice or (choice and item) or part == "]"
            any_choice, choice = stack.pop() if stack else (True, True)
            item = inner
        elif part == "|":
            any_choice, choice, item = any_choice or (choice and item), True, True
        else:
            choice = choice and item
            item = part not in rules or part in finite
    return any_choice


def is_endless_schema(schema: Any) -> bool:
    """Whether a JSON schema has no finite value."""
    steps = 0
    finite: set[str] = set()

    def ends(part: Any, path: tuple[str, ...]) -> bool:
        nonlocal steps
        steps += 1
        if not isinstance(part, Mapping) or steps > _MAX_STEPS:
            return part is not False
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#") and reference not in finite:
            if reference in path or not ends(resolved(schema, reference), (*path, reference)):
                return False
            finite.add(reference)
        if not all(ends(each, path) for each in _list(part.get("allOf"))):
            return False
        for key in ("anyOf", "oneOf"):
            choices = _list(part.get(key))
            if choices and not any(ends(each, path) for each in choices):
                return False
        kind = part.get("type")
        types = {kind} if isinstance(kind, str) else set(_list(kind))
        if not types or not types <= {"object", "array"} or "enum" in part or "const" in part:
            return True
        return any(
            _object_ends(part, path) if kind == "object" else _array_ends(part, path) for kind in types
        )

    def _object_ends(part: Mapping[str, Any], path: tuple[str, ...]) -> bool:
        properties = part.get("properties")
        if not isinstance(properties, Mapping):
            return True
        return all(ends(properties.get(name), path) for name in _list(part.get("required")))

    def _array_ends(part: Mapping[str, Any], path: tuple[str, ...]) -> bool:
        least = part.get("minItems", 0)
        if not isinstance(least, int) or least < 1:
            return True
        first = _list(part.get("prefixItems"))[:least]
        return all(ends(each, path) for each in first) and (
            len(first) == least or ends(part.get("items"), path)
        )

    try:
        return not ends(schema, ())
    except (RecursionError, TypeError):
        return False


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
