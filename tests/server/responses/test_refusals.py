"""Unsupported features of /v1/responses, and requests answered without the engine: each with its message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from openai.types.responses import Response
from responses_play import MCP_HEAD, TOOL, USER, events_of, post
from twofold.api.config import ServerConfig
from twofold.server.app import create_app


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[str, FakeEngine]]:
    """Shared server for requests that do not reach the engine."""
    engine = FakeEngine()
    with serving(create_app(engine, ServerConfig(tool_call_parser="hermes"))) as base:
        yield base, engine
    engine.close()


@pytest.mark.parametrize("probe", ["", [], [{"type": "additional_tools", "tools": [TOOL]}]])
def test_an_empty_input_is_answered_at_once(shared: tuple[str, FakeEngine], probe: Any) -> None:
    url, engine = shared
    body = post(url, input=probe, instructions="be brief").json()
    Response.model_validate(body)
    assert (body["status"], body["output"], body["usage"]["total_tokens"]) == ("completed", [], 0)
    kinds = [event["type"] for event in events_of(url, input=probe)]
    assert kinds == ["response.created", "response.in_progress", "response.completed"]
    assert engine.requests == []
    assert post(url, input=probe, model="gpt-9").status_code == 404


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "required"),
        ({"input": 7}, "input", "string"),
        ({"input": "a", "model": "gpt-9"}, "model", "does not exist"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "'resp_1' is not kept"),
        ({"input": "a", "conversation": "c"}, "conversation", "previous_response_id"),
        ({"input": "a", "background": True}, "background", "leave it out"),
        ({"input": "a", "top_logprobs": 21}, "top_logprobs", "20"),
        ({"input": "a", "max_tokens": 2}, "max_tokens", "max_output_tokens"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "greater"),
        ({"input": "a", "temperature": -1}, "temperature", "greater"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "'schema'"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
        ({"input": "a", "tools": [{"type": "file_search"}]}, "tools[0]", "OpenAI's servers"),
        ({"input": "a", "tools": [TOOL, TOOL]}, "tools", "rename"),
        ({"input": "a", "tools": [MCP_HEAD | {"tools": [MCP_HEAD]}]}, "tools[0]", "neither"),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "'x'"),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice", "allowed_tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "the item 'x' is not kept"),
        ({"input": [{"type": "item_reference"}]}, "input[0]", "needs 'id'"),
        ({"input": [USER, {"type": "function_call", "call_id": "x"}]}, "input[1]", "'name'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "text only"),
        ({"input": [USER] * 4097}, "input", "4096"),
        ({"input": "refuse me"}, "input", "refused"),
        ({"input": "word " * 64}, "input", "64 tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_and_named(
    shared: tuple[str, FakeEngine], body: dict[str, Any], param: str, words: str
) -> None:
    url, engine = shared
    answer = post(url, **body)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert words in error["message"]
    assert engine.requests == []


def test_the_error_of_a_too_long_prompt_has_the_form_clients_parse(shared: tuple[str, FakeEngine]) -> None:
    url, _ = shared
    long = "word " * 64
    assert post(url, input=long).json()["error"]["code"] == "context_length_exceeded"
    events = events_of(url, input=long)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == ["created", "in_progress", "error", "failed"]
    assert events[-1]["response"]["error"]["code"] == events[-2]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")],
)
def test_an_unknown_response_is_not_found(shared: tuple[str, FakeEngine], method: str, path: str) -> None:
    answer = HTTP.request(method, f"{shared[0]}/v1/responses/resp_1{path}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    assert "'resp_1' is not kept" in answer.json()["error"]["message"]
