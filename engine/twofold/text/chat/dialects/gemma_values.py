"""Grammar of Gemma 4's values for a JSON schema: bare keys, strings between marks, no escapes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from twofold.text.chat.lark import Lark, in_slashes
from twofold.text.chat.schema_values import kind_of
from twofold.text.schemas.references import resolved
from twofold.text.schemas.text_patterns import TEXT_KEYWORDS, text_patterns

QUOTE: Final = '<|"|>'
_NOTES: Final = frozenset(("$schema", "$id"))
_KEYWORDS: Final = {
    "string": TEXT_KEYWORDS,
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "boolean": (),
    "null": (),
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
}
_ALL_KEYWORDS: Final = frozenset(word for words in _KEYWORDS.values() for word in words)
_ELSEWHERE: Final = frozenset(("$defs", "definitions"))
_MAX_ITEMS: Final = 1024


class GemmaValues:
    """Expressions of the values that one tool's schema allows."""

    def __init__(
        self,
        lark: Lark,
        root: Mapping[str, Any],
        keys: str,
        refuse: Callable[[str], NoReturn],
        *,
        relaxed: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            root: the document that `$ref` refers to, as `enforceable_schema` makes it.
            keys: regular expression of keys written without marks.
            refuse: raises the error with the given reason.
            relaxed: receives each keyword that is left out; None: they are refused.
        """
        self._lark = lark
        self._root = root
        self._keys = keys
        self._refuse = refuse
        self._relaxed = relaxed
        self._rules: dict[str, str] = {}
        """Name of the rule of each `$ref`."""

    def pairs(self, members: Sequence[tuple[str, Any, bool]]) -> str:
        """Keys with their schemas, in this order; optional ones may be missing."""
        return self._lark.sequence(
            [(f"{self._key(key)} {self.value(schema)}", required) for key, schema, required in members], ","
        )

    def any_pairs(self, schema: Any = True) -> str:
        """Any keys, with values of one schema."""
        one = f'{self._lark.terminal(f"/{self._keys}/")} ":" {self.value(schema)}'
        return self._lark.rule(f'({one} ("," {one})*)?')

    def value(self, schema: Any) -> str:
        """Expression of the values that the schema allows."""
        if schema is True or (isinstance(schema, Mapping) and not schema.keys() - _NOTES - _ELSEWHERE):
            return self._any_value()
        if not isinstance(schema, Mapping):
            self._refuse("a schema that nothing matches")
        keywords = schema.keys() - _NOTES - _ELSEWHERE
        for word, write in (("$ref", self._reference), ("anyOf", self._any_of), ("allOf", self._all_of)):
            if word in keywords:
                self._check(keywords - {word})
                return write(schema[word])
        kinds = schema["type"] if "type" in keywords else None
        kinds = [kinds] if isinstance(kinds, str) else kinds
        for word in ("enum", "const"):
            if word in keywords:
                self._check(keywords - {word, "type"})
                return self._values([schema[word]] if word == "const" else schema[word], kinds)
        kinds = self._kinds_of(keywords) if kinds is None else kinds
        if not isinstance(kinds, list) or not kinds or not all(kind in _KEYWORDS for kind in kinds):
            self._refuse(f"type {json.dumps(kinds)[:60]}")
        self._check(keywords - {"type"} - {word for kind in kinds for word in _KEYWORDS[kind]})
        return self._lark.any_of(self._of_kind(kind, schema) for kind in kinds)

    def _check(self, unsupported: Any) -> None:
        for word in sorted(unsupported):
            if self._relaxed is None:
                self._refuse(repr(word))
            self._relaxed(word)

    def _kinds_of(self, keywords: Any) -> list[str]:
        """Types of the schema; without `type`, those that its keywords constrain. Others would be unconstrained."""
        self._check(keywords - _ALL_KEYWORDS)
        return [kind for kind, words in _KEYWORDS.items() if keywords & set(words)][:1]

    def _any_value(self) -> str:
        if "" not in self._rules:
            self._rules[""] = "gemma_any"
            kinds = ("string", "number", "boolean", "null", "object", "array")
            self._lark.named("gemma_any", " | ".join(self._of_kind(kind, {}) for kind in kinds))
        return self._rules[""]

    def _reference(self, reference: Any) -> str:
        if not isinstance(reference, str) or not reference.startswith("#"):
            self._refuse(f"$ref {json.dumps(reference)[:60]}")
        if reference not in self._rules:
            target = resolved(self._root, reference)
            if target is None:
                self._refuse(f"$ref {reference[:60]!r}, which does not exist,")
            # The rule may refer to itself.
            name = self._rules[reference] = self._lark.new_name("gemma")
            self._lark.named(name, self.value(target))
        return self._rules[reference]

    def _any_of(self, schemas: Any) -> str:
        if not isinstance(schemas, list) or not schemas:
            self._refuse("'anyOf'")
        return self._lark.any_of(self.value(each) for each in schemas)

    def _all_of(self, schemas: Any) -> str:
        if len(schemas) != 1:
            self._check({"allOf"})
        return self.value(schemas[0])

    def _values(self, values: Any, kinds: Any) -> str:
        """Values that have these types; types may be unspecified."""
        values = values if isinstance(values, list) else []
        if isinstance(kinds, list):
            kinds = [*kinds, "integer"] if "number" in kinds else kinds
            values = [each for each in values if kind_of(each) in kinds]
        texts = [text for each in values if (text := _written(each)) is not None]
        if not texts:
            self._refuse("values that cannot be written")
        return self._lark.any_of(map(self._lark.text, texts))

    def _of_kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        lark = self._lark
        if kind == "string":
            return self._string(schema)
        if kind == "object":
            return f'"{{" {self._object(schema)} "}}"'
        if kind == "array":
            return f'"[" {self._items(schema)} "]"'
        return lark.json({"type": kind, **{word: schema[word] for word in _KEYWORDS[kind] if word in schema}})

    def _string(self, schema: Mapping[str, Any]) -> str:
        lark = self._lark
        patterns, left = text_patterns(schema)
        # Where the marks are text, the text before one cannot be bounded.
        left = left if lark.is_token(QUOTE) else [word for word in TEXT_KEYWORDS if word in schema]
        self._check(left)
        if not patterns or not lark.is_token(QUOTE):
            return f"{lark.text(QUOTE)} {lark.up_to(QUOTE)}"
        text = lark.terminal(" & ".join(f"/{in_slashes(each)}/" for each in patterns))
        return f"{lark.text(QUOTE)} {text} {lark.text(QUOTE)}"

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        required = schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            self._refuse("'properties'")
        if not properties and not required:
            return '""' if others is False else self.any_pairs(others)
        members = [(key, each, key in required) for key, each in properties.items()]
        if any(key not in properties for key in required) and others is False:
            self._refuse("a required key that is not allowed")
        return self.pairs(members + [(key, others, True) for key in required if key not in properties])

    def _items(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not _are_counts(_MAX_ITEMS, least, least if most is None else most) or (most or least) < least:
            self._refuse("how many items there are")
        if most == 0:
            return '""'
        item = self.value(schema.get("items", True))
        more = "" if most == 1 else f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return self._lark.rule(f"{item} {more}" if least else f'({item} {more}) | ""')

    def _key(self, key: str) -> str:
        if re.fullmatch(self._keys, key) is not None:
            return self._lark.text(f"{key}:")
        if QUOTE in key:
            self._refuse(f"the key {key[:60]!r}")
        return self._lark.text(f"{QUOTE}{key}{QUOTE}:")


def _written(value: Any) -> str | None:
    """One value as Gemma 4 writes it; None: it cannot be expressed."""
    if isinstance(value, str):
        return None if QUOTE in value else f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, list):
        items = [_written(each) for each in value]
        return None if None in items else f"[{','.join(map(str, items))}]"
    if isinstance(value, Mapping):
        pairs = [(_written(key), _written(each)) for key, each in value.items()]
        return (
            None if any(None in pair for pair in pairs) else f"{{{','.join(f'{k}:{v}' for k, v in pairs)}}}"
        )
    return json.dumps(value)


def _are_counts(most: int, *values: Any) -> bool:
    return all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most for value in values
    )
