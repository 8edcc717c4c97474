"""Converts arguments written between tags to JSON, with the types of the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from twofold.text.chat.reader import KEY, Follow, Marks, TextReader, Wait
from twofold.text.schemas.references import resolved

Kinds = frozenset[str]
"""Type names of JSON schema; empty: unspecified."""

_ALL: Final[Kinds] = frozenset(("string", "integer", "number", "boolean", "object", "array", "null"))
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
"""Literals of templates that print values as Jinja does, and of models trained on them."""
_MAX_STEPS: Final = 32


class ToolSchemas:
    """Allowed types of each parameter of the offered tools."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("parameters"), Mapping):
                self._parameters[str(function.get("name"))] = function["parameters"]

    def kinds(self, tool: str, parameter: str) -> Kinds:
        root = self._parameters.get(tool, {})
        properties = root.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        found: set[str] = set()
        level = [schema]
        # Schemas may refer to themselves: the number of steps is limited.
        for _ in range(_MAX_STEPS):
            if not level:
                break
            found |= _kinds_of(level.pop(), root, level)
        return frozenset(found & _ALL)


def _kinds_of(schema: Any, root: Mapping[str, Any], level: list[Any]) -> set[str]:
    """Types in `schema` itself; schemas that it refers to are appended to `level`."""
    if not isinstance(schema, Mapping):
        return set()
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            level.extend(schema[key])
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        level.append(resolved(root, reference))
    types = schema.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list):
        return {kind for kind in types if isinstance(kind, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return {kind_of(value) for value in values} if isinstance(values, list) else set()


def json_of(text: str, kinds: Kinds) -> str:
    """JSON of a value's text: of the schema's type if the text can be parsed so, else a string."""
    bare = text.strip()
    if kinds & {"boolean", "null"} or not kinds:
        bare = _PYTHON_WORDS.get(bare, bare)
    if kinds != {"string"}:
        try:
            value = json.loads(bare, parse_constant=_refuse)
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
            written.encode()
        except (ValueError, RecursionError):
            pass
        else:
            kind = kind_of(value)
            others = kinds - {"string"} if kinds else _ALL - {"string"}
            # A value of a wrong type is passed on unchanged: the tool can report the error.
            if (
                kind in others
                or (kind == "integer" and "number" in others)
                or "string" not in (kinds or _ALL)
            ):
                return written
    return json.dumps(text, ensure_ascii=False)


class ArgumentsWriter:
    """Writes a call's arguments one by one as a JSON object."""

    def __init__(self, reader: TextReader, schemas: ToolSchemas, tool: str) -> None:
        self._reader = reader
        self._schemas = schemas
        self._tool = tool
        self._written: list[str] = []
        reader.argument("{")

    def key(self, name: str) -> None:
        comma = ", " if self._written else ""
        self._written.append(name)
        self._reader.argument(f"{comma}{json.dumps(name, ensure_ascii=False)}: ")

    def value(
        self,
        name: str,
        end: Marks,
        follows: Sequence[Follow],
        *,
        own_lines: bool = False,
        is_text: bool = False,
    ) -> Wait[str]:
        """Read a parameter's value up to one of `end` and write both. Returns the mark, or "" at the answer's end.

        Args:
            follows: as in `TextReader.scan`. A KEY in it is one that has not been written: arguments have each once.
            own_lines: one line break before and one after the value belong to the tags.
            is_text: the tags say that the value is text, whatever the schema says.
        """
        self.key(name)
        kinds = frozenset(("string",)) if is_text else self._schemas.kinds(self._tool, name)
        if kinds == {"string"}:
            # Only strings can be passed on while they are written, and only they get long.
            self._reader.argument('"')
            write: Callable[[str], None] = lambda text: self._reader.argument(inside_string(text))  # noqa: E731
        else:
            parts: list[str] = []
            write = parts.append
        lines = _WithoutOuterLineBreaks(write) if own_lines else None
        mark = yield from self._reader.scan(end, lines.push if lines else write, self._unwritten(follows))
        if mark:
            self._reader.argument('"' if kinds == {"string"} else json_of("".join(parts), kinds))
        return mark

    def _unwritten(self, follows: Sequence[Follow]) -> list[Follow]:
        keys = "|".join(map(re.escape, self._written))
        key = re.compile(rf"(?![\"']?(?:{keys})[\"'\s<>]){KEY.pattern}")
        return [tuple(key if part is KEY else part for part in follow) for follow in follows]

    def end(self) -> None:
        self._reader.argument("}")
        self._reader.end_call()


class _WithoutOuterLineBreaks:
    """Passes text on, except one line break at its start and one at its end."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._held = ""
        self._begun = False

    def push(self, text: str) -> None:
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._write(text.removesuffix("\n"))


def inside_string(text: str) -> str:
    """Text as it appears between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def kind_of(value: Any) -> str:
    """JSON schema's type name of the value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _refuse(constant: str) -> None:
    raise ValueError(constant)
