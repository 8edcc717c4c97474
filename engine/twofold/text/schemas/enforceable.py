"""Rewrites a schema in normal form to an equal one that the grammar library can follow to its end.

Keywords without an equal are refused by name, or left out where the caller asked for no exact schema.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, unquote

from twofold.text.schemas.finite_patterns import texts_of
from twofold.text.schemas.keywords import ANNOTATIONS, KEYWORDS
from twofold.text.schemas.normal_form import Schema, SchemaError, normal_schema
from twofold.text.schemas.references import followed, resolved

_TYPES: Final = ("string", "integer", "number", "boolean", "object", "array", "null")
_FORMATS: Final = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats that the grammar library enforces. JSON schema takes any other format as a note."""
_DIALECTS: Final = re.compile(
    r"https?://json-schema\.org/(draft-0[467]/schema|draft/20(19-09|20-12)/schema)#?"
)
_UNENFORCED: Final = frozenset(
    ("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "uniqueItems")
) | {
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
}
_LEFT_OUT: Final = ANNOTATIONS | {"$dynamicAnchor", "$recursiveAnchor"}
_LOOKAROUND: Final = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[bB1-9])")
_MAX_BOUND: Final = 9 * 10**18

Relaxed = Callable[[SchemaError], None]
"""Receives each keyword that is left out."""


def enforceable_schema(schema: Any, *, relaxed: Relaxed | None = None) -> Any:
    """A schema that allows the same values, for the grammar library.

    Args:
        schema: from a client.
        relaxed: receives keywords that cannot be enforced, which are left out, so that the schema allows more values.
            None: they are errors.

    Raises:
        SchemaError: a keyword has a value of a wrong type, or cannot be enforced.
    """
    return _Rewriting(normal_schema(schema), relaxed).schema(None, ())


class _Rewriting:
    """One document."""

    def __init__(self, root: Any, relaxed: Relaxed | None) -> None:
        self._root = root
        self._relaxed = relaxed
        references = [part["$ref"] for part in _parts(root) if isinstance(part.get("$ref"), str)]
        self._has_outer = any(not reference.startswith("#") for reference in references)
        """Whether identifiers matter: a reference is not to a place in the document."""

    def schema(self, schema: Any, place: tuple[str, ...]) -> Any:
        """A part of the document; None: all of it."""
        schema = self._root if schema is None else schema
        if isinstance(schema, bool):
            return schema
        if schema == {"not": {}}:
            return False
        kept: Schema = {}
        for word, value in schema.items():
            self._keyword(kept, word, value, (*place, word))
        _with_enforceable_bounds(kept)
        _with_listed_items(kept)
        if "oneOf" in kept:
            self._choose_any(kept, (*place, "oneOf"))
        if "patternProperties" in kept:
            self._name_properties(kept, place)
        return kept

    def _keyword(self, kept: Schema, word: str, value: Any, place: tuple[str, ...]) -> None:
        kind = KEYWORDS.get(word)
        if kind is None or word in _LEFT_OUT:
            return
        if word in _UNENFORCED:
            if not _is_harmless(word, value):
                self._refuse(place, "this keyword cannot be enforced")
            return
        check = _CHECKS.get(word)
        problem = None if check is None else check(value)
        if problem is not None:
            self._refuse(place, problem)
        elif word == "type":
            self._types(kept, value, place)
        elif word == "$ref":
            self._reference(kept, value, place)
        elif word in ("format", "$schema", "$id"):
            known = {"format": value in _FORMATS, "$schema": bool(_DIALECTS.fullmatch(value))}
            if known.get(word, self._has_outer):
                kept[word] = value
        elif kind == "schemas" or (kind == "schema or schemas" and isinstance(value, list)):
            kept[word] = [self.schema(each, (*place, str(number))) for number, each in enumerate(value)]
        elif kind == "named schemas":
            kept[word] = {name: self.schema(each, (*place, name)) for name, each in value.items()}
        elif kind in ("schema", "schema or schemas"):
            kept[word] = self.schema(value, place)
        else:
            kept[word] = value

    def _types(self, kept: Schema, value: Any, place: tuple[str, ...]) -> None:
        unknown = [kind for kind in ([value] if isinstance(value, str) else value) if kind not in _TYPES]
        if unknown:
            self._refuse(
                place, f"{unknown[0][:60]!r} is no type of JSON schema; use one of {', '.join(_TYPES)}"
            )
        else:
            kept["type"] = value

    def _reference(self, kept: Schema, value: str, place: tuple[str, ...]) -> None:
        if not value.startswith("#"):
            # One with an identifier is in the document; the library finds it.
            if self._is_identified(value):
                kept["$ref"] = value
            else:
                self._refuse(place, f"{value[:60]!r} is outside the schema; send the definition within it")
            return
        if value.startswith("#/") or value == "#":
            pointer = unquote(value)
            target = resolved(self._root, pointer)
            if target is None:
                target = resolved(self._root, value)
                pointer = value
            if target is None:
                self._refuse(place, f"the schema has nothing at {value[:60]!r}")
                return
            value = "#" + quote(pointer[1:], safe="/~!$&'()*+,;=:@-._")
        kept["$ref"] = value

    def _is_identified(self, value: str) -> bool:
        return value.partition("#")[0] in {part.get("$id") for part in _parts(self._root)}

    def _choose_any(self, kept: Schema, place: tuple[str, ...]) -> None:
        """Turn `oneOf` into `anyOf`, which is equal if no value matches two members."""
        members = [followed(self._root, member) for member in kept["oneOf"]]
        if not all(_are_disjoint(one, other) for one, other in itertools.combinations(members, 2)):
            self._refuse(
                place, "members that one value may match cannot be told apart; use anyOf, or a const in each"
            )
        choices = kept.pop("oneOf")
        if "anyOf" in kept:
            kept["allOf"] = [*kept.get("allOf", ()), {"anyOf": choices}]
        else:
            kept["anyOf"] = choices

    def _name_properties(self, kept: Schema, place: tuple[str, ...]) -> None:
        """Turn a pattern of few names into properties if it matches one that has its own schema.

        The library would subtract that name and, if none is left, have no text to continue with.
        """
        properties: Schema = dict(kept.get("properties", {}))
        patterns: Schema = {}
        for pattern, schema in kept["patternProperties"].items():
            names = texts_of(pattern) or ()
            if properties.keys().isdisjoint(names):
                patterns[pattern] = schema
            for name in names if pattern not in patterns else ():
                properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema
        kept["patternProperties"] = patterns
        if properties:
            kept["properties"] = properties
        if any(_LOOKAROUND.search(pattern) for pattern in patterns):
            self._refuse((*place, "patternProperties"), _UNREAD_PATTERN)
            kept.pop("additionalProperties", None)  # without the patterns it would exclude their names
            patterns.clear()
        if not patterns:
            kept.pop("patternProperties")

    def _refuse(self, place: tuple[str, ...], problem: str) -> None:
        """Report a keyword that is left out, or raise."""
        error = SchemaError(place, problem)
        if self._relaxed is None:
            raise error
        self._relaxed(error)


def _parts(root: Any) -> Iterator[Mapping[str, Any]]:
    """Every object of a document, whatever it means."""
    level = [root]
    while level:
        part = level.pop()
        if isinstance(part, Mapping):
            yield part
            level += part.values()
        elif isinstance(part, list):
            level += part


def _is_harmless(word: str, value: Any) -> bool:
    """Whether a keyword that cannot be enforced excludes nothing here."""
    if word in ("then", "else"):  # `if` is reported
        return True
    if word in ("uniqueItems", "minContains"):
        return not value
    return word in ("unevaluatedItems", "unevaluatedProperties", "propertyNames") and value in (True, {})


_UNREAD_PATTERN: Final = "look-around, \\b and references to groups cannot be enforced; rewrite the pattern"


def _pattern_problem(value: str) -> str | None:
    if _LOOKAROUND.search(value):
        return _UNREAD_PATTERN
    try:
        re.compile(value)
    except re.error as error:
        # Other errors are of words that Python's expressions lack and the library's have.
        if error.msg.startswith(_BROKEN):
            return f"is no regular expression: {error.msg}"
    except (RecursionError, OverflowError):
        pass  # which the library's own limits decide
    return None


_BROKEN: Final = ("unterminated character set", "missing )", "unbalanced parenthesis", "nothing to repeat")


def _lower_problem(value: Any) -> str | None:
    return None if isinstance(value, bool) or value < _MAX_BOUND else _UNREACHED_BOUND


def _upper_problem(value: Any) -> str | None:
    return None if isinstance(value, bool) or value > -_MAX_BOUND else _UNREACHED_BOUND


_UNREACHED_BOUND: Final = f"bounds beyond ±{_MAX_BOUND} cannot be enforced"
_CHECKS: Final[Mapping[str, Callable[[Any], str | None]]] = {
    "pattern": _pattern_problem,
    "minimum": _lower_problem,
    "exclusiveMinimum": _lower_problem,
    "maximum": _upper_problem,
    "exclusiveMaximum": _upper_problem,
}


def _with_enforceable_bounds(kept: Schema) -> None:
    """Bounds that the library reads: draft 4's flags as bounds of their own, and no number beyond 64 bits.

    A bound that is moved inwards allows fewer values, all of which match.
    """
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(kept.get(flag), bool):
            exclusive = kept.pop(flag)
            if exclusive and bound in kept:
                kept[flag] = kept.pop(bound)
        for word in (flag, bound):
            if word in kept:
                kept[word] = max(-_MAX_BOUND, min(kept[word], _MAX_BOUND))


def _with_listed_items(kept: Schema) -> None:
    """Older drafts' list of items as `prefixItems`."""
    others = kept.pop("additionalItems", None)
    if isinstance(kept.get("items"), list):
        kept["prefixItems"] = kept.pop("items")
        if others is not None:
            kept["items"] = others


def _are_disjoint(one: Any, other: Any) -> bool:
    """Whether it is certain that no value matches both schemas."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    first, second = _types_of(one), _types_of(other)
    if first and second and not first & second:
        return True
    values = _written(_values_of(one)), _written(_values_of(other))
    if values[0] and values[1] and not values[0] & values[1]:
        return True
    if not first == second == {"object"}:
        return False
    required = set(one.get("required", ())) & set(other.get("required", ()))
    parts = [
        (one.get("properties", {}).get(name), other.get("properties", {}).get(name)) for name in required
    ]
    return any(_are_disjoint(*pair) for pair in parts)


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    """Types that the schema allows, integers as numbers; empty: unknown."""
    kinds = schema.get("type", [])
    kinds = (
        [kinds] if isinstance(kinds, str) else kinds or [_PYTHON_TYPES[type(v)] for v in _values_of(schema)]
    )
    return {"number" if kind == "integer" else kind for kind in kinds}


_PYTHON_TYPES: Final = {
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


def _values_of(schema: Mapping[str, Any]) -> list[Any]:
    """Values of `enum` or `const`; empty: unknown."""
    values: list[Any] = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values


def _written(values: Sequence[Any]) -> set[str]:
    """Values as JSON, with numbers in one form."""
    return {json.dumps(float(v) if type(v) is int else v, sort_keys=True) for v in values}
