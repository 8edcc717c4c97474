"""Requests to /v1/responses, and the events of their streams."""

from __future__ import annotations

import json
from typing import Any

from live_server import HTTP
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

TOOL: dict[str, Any] = {"type": "function", "name": "warmth", "parameters": {"type": "object"}}
USER = {"role": "user", "content": "a"}
CALLS = [{"type": "function_call", "call_id": c, "name": "f", "arguments": "{}"} for c in "xy"]
MCP_HEAD: dict[str, Any] = {"type": "namespace", "name": "mcp__files", "description": ""}
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def post(url: str, **body: Any) -> Any:
    return HTTP.post(f"{url}/v1/responses", json=body)


def events_of(url: str, **body: Any) -> list[dict[str, Any]]:
    """A stream's events: each named twice, numbered, and as OpenAI's types have it."""
    answer = post(url, stream=True, **body)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        if event["type"] != "response.failed":
            # OpenAI's server gives codes there that its client's types do not list.
            _EVENT.validate_python(event)
        events.append(event)
    return events
