"""Grammar of values between tags: texts without quotes, everything else as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

from twofold.text.chat.lark import Lark, escaped, in_slashes
from twofold.text.chat.schema_values import Kinds, kind_of
from twofold.text.schemas.references import followed
from twofold.text.schemas.text_patterns import TEXT_KEYWORDS, text_patterns

Schema = Mapping[str, Any]

_MAX_DEPTH: Final = 16
"""Choices within choices, which may refer to themselves."""
_MEMBERS: Final = ("anyOf", "allOf")
_DEFINITIONS: Final = frozenset(("type", "$defs", "definitions"))


class TaggedValues:
    """Expressions of values of one tool's schema."""

    def __init__(
        self,
        lark: Lark,
        root: Schema,
        document: Callable[[Any], Schema],
        relaxed: Callable[[str], None],
        *,
        line: str,
        end: str,
    ) -> None:
        """
        Args:
            root: the tool's schema, which `$ref` refers to.
            document: a part of it as a document of its own.
            relaxed: receives each keyword that is left out.
            line: between a value and its end.
            end: the tag after a value.
        """
        self._lark = lark
        self._root = root
        self._document = document
        self._relaxed = relaxed
        self._line = line
        self._end = end

    def value(self, schema: Any, kinds: Kinds) -> str:
        """Expression of a value and its end tag; "" if no value can be written.

        kinds: types that the reader converts the value to.
        """
        if kinds and "string" not in kinds:
            return f"{self._lark.json(self._document(schema))} {self._after}"
        expressions = list(self._values(schema))
        any_text = self._lark.up_to(self._end)
        # Free text includes every other alternative.
        return any_text if any_text in expressions else self._lark.any_of(expressions) if expressions else ""

    @property
    def _after(self) -> str:
        return self._lark.text(self._line + self._end)

    def _values(self, schema: Any, depth: int = 0) -> Iterator[str]:
        """Expressions of the alternatives."""
        schema = followed(self._root, schema)
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            if schema is not False:
                yield self._lark.up_to(self._end)
            return
        if "enum" in schema or "const" in schema:
            yield from self._listed(schema.get("enum", [schema.get("const")]), schema.get("type"))
            return
        word = next((word for word in _MEMBERS if word in schema), None)
        if word == "anyOf" or (word and len(schema[word]) == 1):
            self._leave_out(schema, _DEFINITIONS | {word})
            for member in schema[word]:
                yield from self._values(member, depth + 1)
            return
        types = schema.get("type", "string")
        for kind in [types] if isinstance(types, str) else types:
            yield self._text(schema) if kind == "string" else self._json(schema, kind)

    def _listed(self, values: list[Any], types: Any) -> Iterator[str]:
        kinds = [types] if isinstance(types, str) else types
        if isinstance(kinds, list):
            kinds = {*kinds, "integer"} if "number" in kinds else kinds
            values = [each for each in values if kind_of(each) in kinds]
        texts = [each if isinstance(each, str) else json.dumps(each) for each in values]
        for text in texts:
            if self._end not in text:
                yield f"{self._lark.text(text)} {self._after}"

    def _text(self, schema: Schema) -> str:
        patterns, left = text_patterns(schema)
        self._leave_out(schema, _DEFINITIONS | (set(TEXT_KEYWORDS) - set(left)))
        if not patterns:
            return self._lark.up_to(self._end)
        line = escaped(self._line).replace("\n", r"\n")
        expressions = [f"/(?:{in_slashes(each)}){line}/" for each in patterns]
        if not self._lark.is_token(self._end):
            # The text of a lexeme up to the end would otherwise go on after the first one.
            expressions.append(f"~/(?s:.*){escaped(self._end)}(?s:.*)/")
        return self._lark.up_to(self._end, " & ".join(expressions))

    def _json(self, schema: Schema, kind: str) -> str:
        return f"{self._lark.json(self._document({**schema, 'type': kind}))} {self._after}"

    def _leave_out(self, schema: Schema, read: Collection[str]) -> None:
        for word in schema:
            if word not in read:
                self._relaxed(word)
