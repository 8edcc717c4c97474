"""Random JSON schemas whose values are short: what structured output must hold, whatever is asked."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

PATTERNS = (
    "^[a-z]{2,5}$",
    "^[A-Z][a-z]+-[0-9]{1,3}$",
    "^(red|green|blue)!?$",
    r"^\d{2}:\d{2}$",
    '^x?[^"\\\\]{1,4}$',
)
FORMATS = ("date", "ipv4", "ipv6", "uuid", "email", "date-time", "time")
NAMES = ("id", "name", "tags", "a b", "größe", "x-y", "value", "$kind", "日", "n0")
ENUMS: tuple[list[Any], ...] = (
    ["red", "green", "blue"],
    [1, 2, 30],
    [None, True, "null"],
    [1.5, -2, "1.5"],
    ["", "a\"b", "line\nbreak", "\\", "é"],
    [{"a": 1}, [1, 2], {"a": [None]}],
)  # fmt: skip


class SchemaMaker:
    """Draws schemas of every keyword that is supported; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Schema] = {}

    def make(self) -> Schema:
        """One whole schema."""
        self._definitions = {}
        schema = self._any(3)
        if self._random.random() < 0.2:  # a tree: it refers to itself, but need not
            child = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}
            self._definitions["tree"] = self._closed(
                {"value": self._scalar(), "child": child}, ["value", "child"]
            )
            schema = self._closed({"tree": {"$ref": "#/$defs/tree"}, "other": schema}, ["tree"])
        return schema | ({"$defs": self._definitions} if self._definitions else {})

    def _any(self, depth: int) -> Schema:
        if depth == 0:
            return self._scalar()
        kinds = (self._object, self._object, self._array, self._choice, self._reference, self._both)
        return self._scalar() if self._random.random() < 0.25 else self._random.choice(kinds)(depth - 1)

    def _scalar(self) -> Schema:
        kinds = (self._string, self._string, self._integer, self._number, self._constant)
        return self._random.choice(kinds)()

    def _string(self) -> Schema:
        draw = self._random.random()
        if draw < 0.25:
            return {"type": "string", "pattern": self._random.choice(PATTERNS), "maxLength": 12}
        if draw < 0.5:
            return {"type": "string", "format": self._random.choice(FORMATS), "maxLength": 40}
        low = self._random.randint(0, 4)
        return {"type": "string", "minLength": low, "maxLength": low + self._random.randint(0, 12)}

    def _integer(self) -> Schema:
        low = self._random.choice((-1000, -7, 0, 3))
        schema: Schema = {
            "type": "integer",
            "minimum": low,
            "maximum": low + self._random.choice((0, 6, 5000)),
        }
        if self._random.random() < 0.2:
            schema = {
                "type": "integer",
                "minimum": 0,
                "exclusiveMaximum": 100,
                "multipleOf": self._random.choice((2, 5)),
            }
        return schema

    def _number(self) -> Schema:
        low = self._random.choice((-2.5, 0, 0.125, 99))
        bound = self._random.choice(("maximum", "exclusiveMaximum"))
        return {"type": "number", "minimum": low, bound: low + self._random.choice((0.25, 10))}

    def _constant(self) -> Schema:
        draw = self._random.random()
        if draw < 0.3:
            return {"const": self._random.choice(self._random.choice(ENUMS))}
        if draw < 0.7:
            return {"enum": self._random.choice(ENUMS)}
        return {"type": self._random.choice(("boolean", "null", ["boolean", "null"]))}

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(NAMES, self._random.randint(1, 4))
        properties = {name: self._any(depth) for name in names}
        schema = self._closed(properties, [name for name in names if self._random.random() < 0.7])
        if self._random.random() < 0.15:
            del schema["additionalProperties"]
            schema |= {"patternProperties": {"^s_[a-c]$": self._scalar()}, "additionalProperties": False}
        return schema

    def _closed(self, properties: dict[str, Schema], required: list[str]) -> Schema:
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def _array(self, depth: int) -> Schema:
        low = self._random.randint(0, 2)
        schema: Schema = {"type": "array", "items": self._any(depth), "minItems": low}
        if self._random.random() < 0.25:
            schema["prefixItems"] = [self._scalar() for _ in range(self._random.randint(1, 2))]
        return schema | {"maxItems": low + self._random.randint(0, 2)}

    def _choice(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._random.randint(1, 3))]}

    def _both(self, depth: int) -> Schema:
        """allOf of two objects that know nothing of one another."""
        first, second = self._random.sample(NAMES, 2)
        parts = [{"properties": {name: self._any(depth)}, "required": [name]} for name in (first, second)]
        known = {first: {}, second: {}}
        return {"allOf": [{"type": "object", "properties": known, "additionalProperties": False}, *parts]}

    def _reference(self, depth: int) -> Schema:
        name = f"part{len(self._definitions)}"
        self._definitions[name] = {}  # its place, while what it holds may need others
        self._definitions[name] = self._any(depth)
        return {"$ref": f"#/$defs/{name}"}
