"""Text that is not Unicode, in any field and in the model's own name: never a 500, never an answer that is not JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.api.valid_text import valid_text
from twofold.server.app import create_app
from twofold.weights.gguf_file import model_name

MODEL: Final = "fake-tales"
SCHEMA: Final = {"type": "object", "properties": {"k": {"type": "string", "enum": ["a"]}}, "required": ["k"]}
TOOL: Final = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CALL: Final = {"id": "i", "type": "function", "function": {"name": "f", "arguments": '{"k": "a"}'}}
TURNS: Final = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": "b", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "i", "content": "c"},
]
BLOCKS: Final = [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS, "tools": [TOOL], "stop": ["z"], "user": "u", "cache_salt": "c"},
    "/v1/completions": {"prompt": ["a", "b"], "stop": ["z"], "bad_words": ["w"], "echo": True},
    "/v1/responses": {"input": [{"role": "user", "content": "a"}], "instructions": "i", "metadata": {"a": "b"}},
    "/v1/messages": {
        "max_tokens": 4,
        "system": "s",
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"k": "a"}}]},
            {"role": "user", "content": BLOCKS},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "stop_sequences": ["z"],
    },
    "/api/chat": {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "options": {"stop": ["z"]}},
    "/api/generate": {"prompt": "a", "system": "s", "options": {"stop": ["z"]}},
    "/api/show": {},
    "/v1/embeddings": {"input": ["a", "b"], "user": "u"},
    "/api/embed": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a"},
}  # fmt: skip
HALVES: Final = ("\ud800", "x\udc00y", "\udcff")


def replaced(value: Any, text: str) -> Iterator[Any]:
    """Copies of JSON data, each with `text` appended to one of its strings."""
    if isinstance(value, str):
        yield value + text
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for other in replaced(value[key], text):
            copy = value.copy()
            copy[key] = other
            yield copy


def check(answer: Any) -> None:
    assert answer.status_code < 500, answer.text
    lines = answer.content.decode().splitlines()
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    values = [json.loads(line) for line in lines]
    assert not any("\ud800" <= character <= "\udfff" for character in json.dumps(values, ensure_ascii=False))
    if answer.status_code >= 400:
        assert answer.status_code in (400, 404), answer.text
        error = values[0]["error"]
        assert "\n" not in (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("path", BODIES)
def test_half_a_character_in_any_field(url: str, path: str) -> None:
    body = {"model": MODEL} | BODIES[path]
    seen = set()
    for text in HALVES:
        for changed in replaced(body, text):
            answer = HTTP.post(url + path, content=json.dumps(changed).encode())
            check(answer)
            seen.add(answer.status_code)
    assert 404 in seen, "the name of another model"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("padding", [0, 20_000], ids=["small", "large"])
def test_bytes_that_are_not_utf_8_are_a_bad_request(url: str, path: str, padding: int) -> None:
    body = json.dumps({"model": "?"} | BODIES[path]).encode() + b" " * padding
    for wrong in (b"\xed\xa0\x80", b"\xff"):
        answer = HTTP.post(url + path, content=body.replace(b"?", wrong))
        check(answer)
        assert answer.status_code == 400


NAME: Final = "ta\udcffles"


@pytest.mark.parametrize("names", [(NAME,), ()], ids=["named", "directory"])
def test_a_model_whose_name_is_not_utf_8(engine: FakeEngine, names: tuple[str, ...]) -> None:
    engine.info = dataclasses.replace(engine.info, model=f"/models/{NAME}")
    with serving(create_app(engine, ServerConfig(served_model_name=names))) as url:
        for path in (
            "/v1/models",
            "/health",
            "/metrics",
            "/api/tags",
            "/api/ps",
            "/props",
            "/get_model_info",
        ):
            answer = HTTP.get(url + path)
            assert answer.status_code == 200, path
            assert "ta\ufffdles" in answer.text, path
        for path, body in BODIES.items():
            check(HTTP.post(url + path, json={"model": "ta\ufffdles"} | body))
            check(HTTP.post(url + path, json={"model": "ta\ufffdles", "stream": True} | body))
        assert (
            HTTP.post(f"{url}/v1/completions", json={"model": "ta\ufffdles", "prompt": "a"}).status_code
            == 200
        )


def test_names_become_valid_text() -> None:
    assert valid_text("a\ud800\udcffb🐉") == "a\ufffd\ufffdb🐉"
    assert model_name("/models/ta\udcffles-Q4-00001-of-00002.gguf") == "ta\ufffdles-Q4"
