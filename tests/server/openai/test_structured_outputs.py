"""Structured output over a real socket: the bundled model's answers by OpenAI's client, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import HTTP, serving
from twofold.api.config import EngineConfig, ServerConfig
from twofold.engine import Engine
from twofold.models.bundled import bundled_model_path
from twofold.server.app import create_app

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "a king"}]},
    "completions": {"prompt": "Once upon a time"},
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"enum": [1, 20, 300]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = Engine.load(EngineConfig(model=str(bundled_model_path()), accelerator="none", cpu_threads=2))
    engine.start()
    with serving(create_app(engine, ServerConfig())) as base:
        yield base
    engine.close()


def holds(text: str) -> bool:
    person = json.loads(text)
    return set(person) == {"name", "age"} and len(person["name"]) <= 9 and person["age"] in (1, 20, 300)


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize(
    ("more", "matches"),
    [
        ({"response_format": FORMAT}, holds),
        ({"response_format": FORMAT, "n": 3, "top_p": 0.9}, holds),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, holds),
        ({"response_format": {"type": "text"}, "guided_regex": "[0-9]{3}"}, re.compile("[0-9]{3}").fullmatch),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, holds),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, holds),
        ({"structured_outputs": {"regex": "[a-c]{4}"}}, re.compile("[a-c]{4}").fullmatch),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}.__contains__),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, re.compile("x[0-9]").fullmatch),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, holds),
        ({"guided_choice": ["yes", "no"], "guided_decoding_backend": "xgrammar"}, {"yes", "no"}.__contains__),
        ({"guided_grammar": 'start: "x" /[0-9]/'}, re.compile("x[0-9]").fullmatch),
        ({"response_format": FORMAT, "unknown": "x" * 40_000}, holds),
    ],
)
def test_answers_match(url: str, endpoint: str, more: dict[str, Any], matches: Any) -> None:
    body = BODIES[endpoint] | {"temperature": 1.0, "seed": 4, "max_tokens": 300} | more
    response = HTTP.post(url + PATHS[endpoint], json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert len(choices) == more.get("n", 1)
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        assert matches(choice["text"] if endpoint == "completions" else choice["message"]["content"])


def test_openais_client_streams_what_it_gets_whole(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=30) as client:
        requested: dict[str, Any] = {
            "model": "twofold-tales",
            "messages": [{"role": "user", "content": "a king"}],
            "response_format": FORMAT,
            "seed": 5,
            "max_tokens": 300,
        }
        whole = client.chat.completions.create(**requested).choices[0].message.content
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(**requested, stream=True)
        ]
    assert len(pieces) > 3
    assert "".join(pieces) == whole
    assert holds(str(whole))


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": {"schema": SCHEMA}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "other": 1}}, "response_format.other"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "other": 1}}, "structured_outputs.other"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        # Errors that only the grammar compiler detects.
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "integer", "minimum": 2, "maximum": 1}}, "guided_json"),
        ({"guided_regex": "a" * 140_000}, "guided_regex"),
        ({"guided_grammar": "start: ("}, "guided_grammar"),
        ({"guided_json": {}, "guided_whitespace_pattern": "(("}, "guided_json"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_400(url: str, endpoint: str, more: dict[str, Any], param: str | None) -> None:
    response = HTTP.post(url + PATHS[endpoint], json=BODIES[endpoint] | {"max_tokens": 3} | more)
    assert response.status_code == 400, response.text
    assert param is None or response.json()["error"]["param"] == param
