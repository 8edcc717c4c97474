"""Values that local clients send beyond OpenAI's own limits, and values for none: accepted in every API."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.server.app import create_app

WORDS: list[Any] = [{"role": "user", "content": "a b c"}]
CHAT, TEXT, MESSAGES, OLLAMA, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/api/chat",
    "/v1/responses",
)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": WORDS},
    TEXT: {"prompt": "a b c"},
    MESSAGES: {"model": "fake-tales", "messages": WORDS, "max_tokens": 8},
    OLLAMA: {"model": "fake-tales", "messages": WORDS, "stream": False},
    RESPONSES: {"input": "a b c"},
}
STOPS = [f"speaker {number}:" for number in range(40)]


def sampling(shared: tuple[str, FakeEngine], path: str, more: dict[str, Any]) -> Any:
    """The sampling parameters of an accepted request."""
    url, engine = shared
    given = {"options": more} if path == OLLAMA else more
    answer = HTTP.post(url + path, json=BODIES[path] | given)
    assert answer.status_code == 200, answer.text
    return engine.requests[-1].sampling


@pytest.mark.parametrize(
    ("path", "more", "field", "value"),
    [
        (CHAT, {"stop": STOPS}, "stop", tuple(STOPS)),
        (MESSAGES, {"stop_sequences": STOPS}, "stop", tuple(STOPS)),
        (OLLAMA, {"stop": STOPS}, "stop", tuple(STOPS)),
        *[(path, {"stop": empty}, "stop", ()) for path in (CHAT, TEXT, OLLAMA) for empty in ("", [], [""], ["", ""])],
        (CHAT, {"stop": ["", "x"]}, "stop", ("x",)),
        (MESSAGES, {"stop_sequences": [""]}, "stop", ()),
        *[(path, {"top_p": 0}, "top_p", 0.0) for path in (CHAT, TEXT, MESSAGES, OLLAMA, RESPONSES)],
        (CHAT, {"max_tokens": -1}, "max_tokens", 61),
        (CHAT, {"max_completion_tokens": -1}, "max_tokens", 61),
        (TEXT, {"max_tokens": -1}, "max_tokens", 61),
        (OLLAMA, {"num_predict": 0}, "max_tokens", 61),
        (OLLAMA, {"num_predict": -2}, "max_tokens", 61),
        (OLLAMA, {"temperature": -1.0}, "temperature", 0.0),
        (OLLAMA, {"top_p": 1.5}, "top_p", 1.0),
        (OLLAMA, {"top_k": -5}, "top_k", 0),
        (OLLAMA, {"presence_penalty": 3}, "presence_penalty", 2),
        (OLLAMA, {"repeat_penalty": 0}, "repetition_penalty", 1.0),
        (OLLAMA, {"mirostat": 2, "tfs_z": 0.5, "typical_p": 0.7}, "top_p", 1.0),
        (CHAT, {"seed": 2**64 - 1}, "seed", 2**63 - 1),
        (CHAT, {"stop_token_ids": list(range(200))}, "stop_token_ids", tuple(range(200))),
        (CHAT, {"bad_words": ["", "x"]}, "max_tokens", 61),
    ],
)  # fmt: skip
def test_what_local_clients_send_is_accepted(
    shared: tuple[str, FakeEngine], path: str, more: dict[str, Any], field: str, value: Any
) -> None:
    assert getattr(sampling(shared, path, more), field) == value


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"top_p": -0.1}),
        (CHAT, {"top_p": 1.1}),
        (CHAT, {"max_tokens": 0}),
        (CHAT, {"max_tokens": -2}),
        (CHAT, {"stop": [5]}),
        (CHAT, {"stop": ["x"] * 1025}),
        (CHAT, {"seed": 2**64}),
        (TEXT, {"max_tokens": -2}),
    ],
)
def test_what_has_no_meaning_is_refused(
    shared: tuple[str, FakeEngine], path: str, more: dict[str, Any]
) -> None:
    answer = HTTP.post(shared[0] + path, json=BODIES[path] | more)
    assert answer.status_code == 400
    assert next(iter(more)) in answer.json()["error"]["param"]


ODD: dict[str, Any] = {
    "nulls": {"type": "object", "properties": None, "required": None},
    "a property that is true": {"type": "object", "properties": {"a": True}},
    "unknown words": {
        "type": "object",
        "x-guidance": {"lenient": True},
        "properties": {"a": {"description": 5}},
    },
}


@pytest.mark.parametrize("name", [*ODD, "none"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, OLLAMA, RESPONSES])
def test_tools_with_odd_schemas_are_shown_in_normal_form(engine: FakeEngine, path: str, name: str) -> None:
    engine.max_context = 4096
    schema = {"parameters": ODD[name]} if name in ODD else {}
    function = {"name": "f", **schema}
    tool = {
        MESSAGES: {"name": "f", "input_schema": ODD.get(name, {"type": "object"})},
        RESPONSES: {"type": "function", **function},
    }.get(path, {"type": "function", "function": function})
    with serving(create_app(engine, ServerConfig(tool_call_parser="hermes"))) as url:
        answer = HTTP.post(url + path, json=BODIES[path] | {"tools": [tool]})
        assert answer.status_code == 200, answer.text
        (shown,) = engine.tokenizer.rendered[1]
        assert "null" not in str(shown).replace("None", "null")
        assert "x-guidance" not in str(shown)


@pytest.mark.parametrize("path", [CHAT, OLLAMA, RESPONSES])
def test_a_tool_with_a_wrong_schema_is_named_with_its_keyword(engine: FakeEngine, path: str) -> None:
    function = {"name": "look_up", "parameters": {"type": "object", "properties": {"a": {"required": "b"}}}}
    tool = {"type": "function"} | (function if path == RESPONSES else {"function": function})
    with serving(create_app(engine, ServerConfig(tool_call_parser="hermes"))) as url:
        answer = HTTP.post(url + path, json=BODIES[path] | {"tools": [tool]})
    assert answer.status_code == 400
    assert "'look_up': parameters.properties.a.required: must be a list of names" in answer.text
