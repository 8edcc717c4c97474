"""References between the parts of a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from twofold.text.schemas.keywords import HOLDS_SCHEMAS, KEYWORDS

_MAX_STEPS: Final = 8


def resolved(root: Any, reference: str) -> Any:
    """The target of a `$ref` within the document, "#/…"; None if it does not exist."""
    target: Any = root
    for part in filter(None, reference[1:].split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        else:
            target = target.get(key) if isinstance(target, Mapping) else None
    return target


def followed(root: Any, schema: Any) -> Any:
    """The schema, or what its `$ref` refers to; a chain of references is followed a few steps."""
    for _ in range(_MAX_STEPS):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        schema = resolved(root, reference)
    return schema


def moved(schema: Any, place: str) -> Any:
    """A schema with its references to the root redirected to `place`, such as #/$defs/tool."""
    if isinstance(schema, list):
        return [moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for word, value in schema.items():
        kind = KEYWORDS.get(word, "data")
        if word == "$ref" and isinstance(value, str) and value.startswith("#"):
            made[word] = f"{place}{value[1:]}"
        elif kind in ("named schemas", "named dependencies") and isinstance(value, Mapping):
            made[word] = {name: moved(each, place) for name, each in value.items()}
        else:
            made[word] = moved(value, place) if kind in HOLDS_SCHEMAS else value
    return made
