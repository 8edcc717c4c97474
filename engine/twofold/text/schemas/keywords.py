"""Table of JSON schema's keywords: the type of value that each takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

ValueKind = Literal[
    "schema",
    "schemas",
    "schema or schemas",
    "named schemas",
    "named dependencies",
    "types",
    "values",
    "data",
    "names",
    "named names",
    "count",
    "number",
    "number or flag",
    "flag",
    "text",
    "note",
]
"""data: any value, null included. note: text for readers. named …: an object whose keys are names of properties."""


def _of_kind(kind: ValueKind, names: str) -> dict[str, ValueKind]:
    return dict.fromkeys(names.split(), kind)


KEYWORDS: Final[Mapping[str, ValueKind]] = MappingProxyType(
    _of_kind("schema", "additionalProperties additionalItems contains propertyNames not if then else")
    | _of_kind("schema", "unevaluatedItems unevaluatedProperties contentSchema")
    | _of_kind("schemas", "allOf anyOf oneOf prefixItems")
    | _of_kind("schema or schemas", "items")
    | _of_kind("named schemas", "properties patternProperties $defs definitions dependentSchemas")
    | _of_kind("named dependencies", "dependencies")
    | _of_kind("types", "type")
    | _of_kind("values", "enum")
    | _of_kind("data", "const default examples")
    | _of_kind("names", "required")
    | _of_kind("named names", "dependentRequired")
    | _of_kind("count", "minLength maxLength minItems maxItems minProperties maxProperties")
    | _of_kind("count", "minContains maxContains")
    | _of_kind("number", "minimum maximum multipleOf")
    | _of_kind("number or flag", "exclusiveMinimum exclusiveMaximum")
    | _of_kind("flag", "uniqueItems")
    | _of_kind("text", "pattern format $ref $dynamicRef $recursiveRef $id $schema $anchor $dynamicAnchor")
    | _of_kind("text", "contentEncoding contentMediaType")
    | _of_kind("note", "title description $comment")
)
HOLDS_SCHEMAS: Final = frozenset(
    ("schema", "schemas", "schema or schemas", "named schemas", "named dependencies")
)
ANNOTATIONS: Final = frozenset(
    (
        "title",
        "description",
        "$comment",
        "default",
        "examples",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
    )
)
"""Keywords that allow and exclude no value."""
