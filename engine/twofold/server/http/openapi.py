"""Parts of /openapi.json that FastAPI cannot derive: hand-parsed bodies, answers, every kind of refusal."""

from __future__ import annotations

import functools
import json
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter

COMPONENTS: Final = "#/components/schemas/"
"""Location of an OpenAPI document's named schemas."""

_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "description": "A text under /api, else an object",
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "required": ["message", "type", "param", "code"],
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["string", "null"]},
                    },
                },
            ],
        }
    },
}
REFUSALS: Final = {
    "401": "No key, or a wrong one",
    "403": "A web page of another site",
    "404": "Another model, or nothing there",
    "500": "The server's own fault",
    "503": "Loading, draining, or too many connections",
}
REFUSALS_OF_BODIES: Final = {
    "400": "The request can never be served",
    "408": "The request came too slowly",
    "413": "The request is too large",
    "415": "A browser's body that is not declared as JSON",
    "429": "All places are taken",
}


def body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """A request's schema, for a route's `openapi_extra`."""
    content = {"application/json": {"schema": json.loads(_json_schema(schema))}}
    return {"requestBody": {"required": True, "content": content}}


def answers(
    schema: Any, *, stream: dict[str, Any] | None = None, status: int = 200, description: str = "Done"
) -> dict[int | str, dict[str, Any]]:
    """An answer's schema, for a route's `responses`. stream: alternative content, from `events_of` or `lines_of`."""
    return {status: {"description": description, "model": schema, "content": stream or {}}}


def events_of(event: Any, *, with_done: bool = True, error: str | None = "Error") -> dict[str, Any]:
    """The content of an event stream, described as FastAPI does it: `itemSchema` is one event, whose `data` is JSON.

    Args:
        event: type of `data`.
        with_done: whether the last event's data is [DONE].
        error: component of the event that ends a failed stream; None: `event` covers it.
    """
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": _schema(event, error),
    }
    if with_done:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    properties = {"event": {"type": "string"}, "data": data}
    return {
        "text/event-stream": {
            "itemSchema": {"type": "object", "required": ["data"], "properties": properties}
        }
    }


def lines_of(line: Any) -> dict[str, Any]:
    """The content of a stream of JSON lines."""
    return {"application/x-ndjson": {"itemSchema": _schema(line, "Error")}}


def _schema(reply: Any, error: str | None) -> dict[str, Any]:
    """A schema with `$defs`, which `openapi.document` moves to OpenAPI's place for them."""
    schema: dict[str, Any] = json.loads(_json_schema(reply))
    if error is None:
        return schema
    defs = schema.pop("$defs", {})
    return {"anyOf": [schema, {"$ref": COMPONENTS + error}], "$defs": defs}


@functools.cache
def _json_schema(kind: Any) -> str:
    """A type's schema as JSON. pydantic takes half of the time in which an application is made for it."""
    return json.dumps(TypeAdapter(kind).json_schema(ref_template=COMPONENTS + "{model}"))


def text_answer(media_type: str) -> dict[int | str, dict[str, Any]]:
    """A non-JSON answer, for a route's `responses`; the route's `response_class` is not JSON's."""
    return {200: {"description": "Done", "content": {media_type: {"schema": {"type": "string"}}}}}


def document(app: FastAPI) -> dict[str, Any]:
    """/openapi.json; built once."""
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        schemas: dict[str, Any] = made.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = _ERROR
        for operation in (operation for path in made["paths"].values() for operation in path.values()):
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            # pydantic puts referenced schemas beside the schema; OpenAPI has one place for all of them.
            schemas |= body.get("schema", {}).pop("$defs", {})
            for answer in operation["responses"].values():
                for content in answer.get("content", {}).values():
                    schemas |= _taken_defs(content.get("itemSchema", {}))
            # Every path parameter is a plain string, so FastAPI itself refuses nothing.
            operation["responses"].pop("422", None)
            refusals = REFUSALS | (REFUSALS_OF_BODIES if body else {})
            refused = {code: _refusal(words) for code, words in refusals.items()}
            operation["responses"] = refused | operation["responses"]
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        app.openapi_schema = made
    return app.openapi_schema


def _taken_defs(schema: Any) -> dict[str, Any]:
    """Remove the `$defs` of a stream's schemas and return them."""
    if isinstance(schema, list):
        return {name: made for each in schema for name, made in _taken_defs(each).items()}
    if not isinstance(schema, dict):
        return {}
    defs: dict[str, Any] = schema.pop("$defs", {})
    return defs | _taken_defs(list(schema.values()))


def _refusal(description: str) -> dict[str, Any]:
    schema = {"$ref": f"{COMPONENTS}Error"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
