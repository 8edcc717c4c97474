"""Brings a client's schema into one form before any template, parser or grammar reads it.

Clients write schemas from many languages. A null stands for a missing keyword, because several of them write empty
lists and objects so. A value of a wrong type is an error that names its keyword.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from twofold.text.schemas.keywords import KEYWORDS, ValueKind

Schema = dict[str, Any]

_PRIVATE: Final = frozenset(("x-guidance",))
"""Words that the grammar library reads and JSON schema does not define."""
_MAX_SHOWN: Final = 60


class SchemaError(ValueError):
    """A schema that cannot be used, with the place of the keyword, such as properties.city.pattern."""

    def __init__(self, place: tuple[str, ...], problem: str) -> None:
        self.place = ".".join(place)
        self.problem = problem
        super().__init__(f"{self.place}: {problem}" if place else problem)


def normal_schema(schema: Any, place: tuple[str, ...] = ()) -> Any:
    """The schema in normal form: an object, or a boolean.

    Equal to the given one, apart from nulls: no keyword is null, lists of alternatives are not empty, counts are whole
    numbers, notes are texts, and schemas by name are objects. Unknown keywords are kept, since templates show them.

    Raises:
        SchemaError: a keyword's value has a wrong type.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise SchemaError(place, f"must be a JSON schema, an object (given: {_shown(schema)})")
    normal: Schema = {}
    for word, value in schema.items():
        kind = KEYWORDS.get(word)
        if word in _PRIVATE or (value is None and kind not in (None, "data")):
            continue
        if kind is None:
            normal[word] = value
        elif (made := _READERS[kind](value, (*place, word))) is not _MISSING:
            normal[word] = made
    return normal


def normal_parameters(given: Any) -> Schema:
    """A tool's parameters in normal form.

    Raises:
        SchemaError: as `normal_schema`, with the tool's field as the first place.
    """
    normal = normal_schema(given, ("parameters",))
    if not isinstance(normal, dict):
        raise SchemaError(("parameters",), f"must be a JSON schema, an object (given: {_shown(given)})")
    return normal


_MISSING: Final = object()
"""Value of a keyword that counts as missing."""


def _schema(value: Any, place: tuple[str, ...]) -> Any:
    return normal_schema(value, place)


def _member(value: Any, place: tuple[str, ...]) -> Schema:
    """A schema in a list or under a name, as an object: templates look for its keys. A null has no keywords."""
    normal = {} if value is None else normal_schema(value, place)
    if isinstance(normal, bool):
        return {} if normal else {"not": {}}
    return dict(normal)


def _schemas(value: Any, place: tuple[str, ...]) -> Any:
    if not isinstance(value, list):
        raise _schema_error(place, "a list of schemas", value)
    return [_member(each, (*place, str(number))) for number, each in enumerate(value)] or _MISSING


def _schema_or_schemas(value: Any, place: tuple[str, ...]) -> Any:
    return _schemas(value, place) if isinstance(value, list) else normal_schema(value, place)


def _named_schemas(value: Any, place: tuple[str, ...]) -> Schema:
    if not isinstance(value, Mapping):
        raise _schema_error(place, "an object of schemas by name", value)
    return {name: _member(each, (*place, name)) for name, each in value.items()}


def _named_dependencies(value: Any, place: tuple[str, ...]) -> Schema:
    if not isinstance(value, Mapping):
        raise _schema_error(place, "an object of schemas or lists of names", value)
    return {
        name: _names(each, (*place, name)) if isinstance(each, list) else _member(each, (*place, name))
        for name, each in value.items()
    }


def _types(value: Any, place: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _schema_error(place, "a type's name, or a list of them", value)
    # A null among the names means the type null to those who write it.
    kinds = ["null" if each is None else each for each in value]
    for each in kinds:
        if not isinstance(each, str):
            raise _schema_error(place, "a type's name, or a list of them", each)
    return list(dict.fromkeys(kinds)) or _MISSING


def _values(value: Any, place: tuple[str, ...]) -> Any:
    if not isinstance(value, list):
        raise _schema_error(place, "a list of values", value)
    return value or _MISSING


def _names(value: Any, place: tuple[str, ...]) -> list[str]:
    if not isinstance(value, list):
        raise _schema_error(place, "a list of names", value)
    for each in value:
        if not isinstance(each, str):
            raise _schema_error(place, "a list of names", each)
    return list(dict.fromkeys(value))


def _named_names(value: Any, place: tuple[str, ...]) -> dict[str, list[str]]:
    if not isinstance(value, Mapping):
        raise _schema_error(place, "an object of lists of names", value)
    return {name: _names(each, (*place, name)) for name, each in value.items() if each is not None}


def _count(value: Any, place: tuple[str, ...]) -> Any:
    number = _number(value, place)
    if number is _MISSING:
        return _MISSING
    if number != int(number) or number < 0:
        raise _schema_error(place, "a whole number, 0 or more", value)
    return int(number)


def _number(value: Any, place: tuple[str, ...]) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _schema_error(place, "a number", value)
    return value if math.isfinite(value) else _MISSING  # a bound beyond the numbers excludes none


def _number_or_flag(value: Any, place: tuple[str, ...]) -> Any:
    return value if isinstance(value, bool) else _number(value, place)


def _flag(value: Any, place: tuple[str, ...]) -> bool:
    if not isinstance(value, bool):
        raise _schema_error(place, "true or false", value)
    return value


def _text(value: Any, place: tuple[str, ...]) -> str:
    if not isinstance(value, str):
        raise _schema_error(place, "a text", value)
    return value


def _note(value: Any, _place: tuple[str, ...]) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _data(value: Any, _place: tuple[str, ...]) -> Any:
    return value


_READERS: Final[Mapping[ValueKind, Callable[[Any, tuple[str, ...]], Any]]] = {
    "schema": _schema,
    "schemas": _schemas,
    "schema or schemas": _schema_or_schemas,
    "named schemas": _named_schemas,
    "named dependencies": _named_dependencies,
    "types": _types,
    "values": _values,
    "data": _data,
    "names": _names,
    "named names": _named_names,
    "count": _count,
    "number": _number,
    "number or flag": _number_or_flag,
    "flag": _flag,
    "text": _text,
    "note": _note,
}


def _schema_error(place: tuple[str, ...], expected: str, value: Any) -> SchemaError:
    return SchemaError(place, f"must be {expected} (given: {_shown(value)})")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
