"""JSON schema of the Trace Event Format's JSON Object Format, after its published description.

Source: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (sections "JSON Object Format",
"Event Descriptions"). It describes the phases that exports write; an event of any other phase is refused.
"""

from __future__ import annotations

from typing import Any

_NUMBER = {"type": "number"}
_TEXT = {"type": "string", "minLength": 1}
_PLACE = {"pid": {"type": "integer"}, "tid": {"type": "integer"}, "name": _TEXT}


def _event(phase: str | list[str], required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    phases = [phase] if isinstance(phase, str) else phase
    return {
        "type": "object",
        "properties": {"ph": {"enum": phases}, **_PLACE, **required, **optional},
        "required": ["ph", *_PLACE, *required],
        "additionalProperties": False,
    }


_ARGS = {"type": "object"}
COMPLETE = _event(
    "X", {"ts": {"type": "number", "minimum": 0}, "dur": {"type": "number", "minimum": 0}}, args=_ARGS
)
INSTANT = _event("i", {"ts": _NUMBER, "s": {"enum": ["g", "p", "t"]}}, args=_ARGS)
COUNTER = _event(
    "C", {"ts": _NUMBER, "args": {"type": "object", "minProperties": 1, "additionalProperties": _NUMBER}}
)
NESTABLE_ASYNC = _event(
    ["b", "n", "e"], {"ts": _NUMBER, "cat": _TEXT, "id": {"type": ["integer", "string"]}}, args=_ARGS
)
METADATA = {
    "oneOf": [
        _event(
            "M",
            {
                "name": {"enum": ["process_name", "thread_name"]},
                "args": {"type": "object", "properties": {"name": _TEXT}, "required": ["name"]},
            },
            ts=_NUMBER,
        ),
        _event(
            "M",
            {
                "name": {"enum": ["process_sort_index", "thread_sort_index"]},
                "args": {
                    "type": "object",
                    "properties": {"sort_index": {"type": "integer"}},
                    "required": ["sort_index"],
                },
            },
            ts=_NUMBER,
        ),
    ]
}
TRACE = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "traceEvents": {
            "type": "array",
            "items": {"oneOf": [COMPLETE, INSTANT, COUNTER, NESTABLE_ASYNC, METADATA]},
        },
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
    },
    "required": ["traceEvents"],
    "additionalProperties": False,
}
