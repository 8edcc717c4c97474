"""What /openapi.json says that FastAPI cannot see: bodies that are parsed by hand, answers, every kind of refusal."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_COMPONENTS: Final = "#/components/schemas/"
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
_REFUSALS: Final = {
    "401": "No key, or a wrong one",
    "403": "A web page of another site",
    "404": "Another model, or nothing there",
    "500": "The server's own fault",
    "503": "Loading, draining, or too many connections",
}
_REFUSALS_OF_BODIES: Final = {
    "400": "The request can never be served",
    "408": "The request came too slowly",
    "413": "The request is too large",
    "415": "Not JSON",
    "429": "All places are taken",
}


def body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """A request's schema, for a route's `openapi_extra`."""
    content = {"application/json": {"schema": schema.model_json_schema(ref_template=_COMPONENTS + "{model}")}}
    return {"requestBody": {"required": True, "content": content}}


def answers(
    schema: Any, *, stream: str | None = None, status: int = 200, description: str = "Done"
) -> dict[int | str, dict[str, Any]]:
    """An answer's schema, for a route's `responses`. stream: the other type it may have, of which JSON is a part."""
    content = {} if stream is None else {stream: {"schema": {"type": "string"}}}
    return {status: {"description": description, "model": schema, "content": content}}


def text_answer(media_type: str) -> dict[int | str, dict[str, Any]]:
    """An answer that is no JSON, likewise; its route's `response_class` is not JSON's."""
    return {200: {"description": "Done", "content": {media_type: {"schema": {"type": "string"}}}}}


def document(app: FastAPI) -> dict[str, Any]:
    """/openapi.json; made once."""
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        schemas: dict[str, Any] = made.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = _ERROR
        for operation in (operation for path in made["paths"].values() for operation in path.values()):
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            # pydantic puts what a schema refers to beside it; OpenAPI has one place for all of it.
            schemas |= body.get("schema", {}).pop("$defs", {})
            # Every path parameter of ours is a text: nothing is left for FastAPI itself to refuse.
            operation["responses"].pop("422", None)
            refusals = _REFUSALS | (_REFUSALS_OF_BODIES if body else {})
            told = {code: _refusal(words) for code, words in refusals.items()}
            operation["responses"] = told | operation["responses"]
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        app.openapi_schema = made
    return app.openapi_schema


def _refusal(description: str) -> dict[str, Any]:
    schema = {"$ref": f"{_COMPONENTS}Error"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
