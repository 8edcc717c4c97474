"""Conversations with what other servers and models gave out, in every API: read alike, and refused only if empty."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.server.app import create_app
from twofold.text.conversation import repairs

PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "ollama": "/api/chat",
}
PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}
IMAGE = "[image: this model reads text only]"
USER: dict[str, Any] = {"role": "user", "content": "go"}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, FakeEngine]]:
    engine = FakeEngine()
    engine.max_context = 4096
    with serving(
        create_app(engine, ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3"))
    ) as base:
        yield base, engine
    engine.close()


def chat_call(arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function} | more]}


def use(**more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}} | more],
    }


def use_result(content: Any, **more: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "c", "content": content} | more],
    }


def item(**more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"} | more


def output(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": "c", "output": content} | more


def ollama_call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"} | function}]}


CALL, RESULT = ("assistant", "", ("f", "c", {})), ("tool", "r", "c")
REQUESTED = ("user", "go")
# kind: (API, messages or items, what the template gets)
SENT: dict[str, tuple[str, list[Any], list[Any]]] = {
    "a call with an object": ("chat", [USER, chat_call({"a": 1}),
        {"role": "tool", "tool_call_id": "c", "content": "r"}],
        [REQUESTED, ("assistant", "", ("f", "c", {"a": 1})), RESULT]),
    "a call of no type, with a number as id": ("chat", [chat_call(None, id=7, type=None),
        {"role": "tool", "tool_call_id": 7, "content": "r"}, USER],
        [("assistant", "", ("f", "7", {})), ("tool", "r", "7"), REQUESTED]),
    "a result without an id": ("chat", [USER, chat_call(""), {"role": "tool", "content": {"warmth": 20}}],
        [REQUESTED, CALL, ("tool", '{"warmth": 20}', "c")]),
    "the older form of calls": ("chat", [USER, {"role": "assistant", "content": None, "function_call": {"name": "f",
        "arguments": "{}"}}, {"role": "function", "name": "f", "content": "r"}],
        [REQUESTED, ("assistant", "", ("f", "call00000", {})), ("tool", "r", "call00000")]),
    "a damaged call": ("chat", [USER, chat_call('{"a": '), {"role": "tool", "tool_call_id": "c", "content": "r"}],
        [REQUESTED, ("assistant", "", ("f", "c", {"invalid_arguments": '{"a": '})), RESULT]),
    "a long id": ("chat", [USER, chat_call(id="x" * 9000),
        {"role": "tool", "tool_call_id": "x" * 9000, "content": "r"}],
        [REQUESTED, ("assistant", "", ("f", "call_QbGMztY2a4SAtxVc9pdT0Oys", {})),
         ("tool", "r", "call_QbGMztY2a4SAtxVc9pdT0Oys")]),
    "pictures everywhere": ("chat", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": [{"type": "output_image"}]}, chat_call(),
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "image"}]},
        {"role": "user", "content": [{"type": "text", "text": "what? "}, {"type": "input_image"}]}],
        [("user", IMAGE), ("assistant", IMAGE), CALL, ("tool", IMAGE, "c"), ("user", f"what? {IMAGE}")]),
    "a refusal and a spoken answer": ("chat", [USER, {"role": "assistant", "refusal": "no"}, USER,
        {"role": "assistant", "content": None, "audio": {"id": "a", "transcript": "hi"}}, USER,
        {"role": "assistant", "audio": {"id": "a"}}, USER],
        [REQUESTED, ("assistant", "no"), REQUESTED, ("assistant", "hi"), REQUESTED,
         ("assistant", "[audio: this model reads text only]"), REQUESTED]),
    "thinking as a part": ("chat", [USER, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "a"}]}, USER],
        [REQUESTED, ("assistant", "a", "hm"), REQUESTED]),
    "calls as parts": ("chat", [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]}, {"role": "tool", "tool_call_id": "c",
        "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]}],
        [REQUESTED, ("assistant", "a", ("f", "c", {"a": 1})), RESULT]),
    "a begun answer that was continued": ("chat", [USER, {"role": "assistant", "content": "a", "prefix": True}, USER],
        [REQUESTED, ("assistant", "a"), REQUESTED]),
    "blocks of Anthropic's servers": ("messages", [USER, {"role": "assistant", "content": [
        {"type": "redacted_thinking", "data": "x"}, {"type": "server_tool_use", "id": "s", "name": "web", "input": {}},
        {"type": "text", "text": "a"}]}, USER],
        [REQUESTED, ("assistant", "[server_tool_use web: this model reads text only]a"), REQUESTED]),
    "a result with a picture": ("messages", [USER, use(), use_result([{"type": "text", "text": "a.png"},
        {"type": "image", "source": PNG}])], [REQUESTED, CALL, ("tool", f"a.png\n{IMAGE}", "c")]),
    "a picture beside a result": ("messages", [USER, use(), {"role": "user", "content": [
        use_result("r")["content"][0], {"type": "image", "source": PNG}]}], [REQUESTED, CALL, RESULT, ("user", IMAGE)]),
    "a picture after its question": ("chat", [USER, {"role": "user", "content": [{"type": "image_url"}]}],
        [REQUESTED, ("user", IMAGE)]),
    "a failed result without words": ("messages", [USER, use(input=None), use_result(None, is_error=True)],
        [REQUESTED, CALL, ("tool", "Error: ", "c")]),
    "input as text, result without an id": ("messages", [USER, use(input='{"a": 1}'), use_result("r", tool_use_id="")],
        [REQUESTED, ("assistant", "", ("f", "c", {"a": 1})), RESULT]),
    "a document of words": ("messages", [{"role": "user", "content": [
        {"type": "document", "source": {"type": "text", "data": "words"}}, {"type": "text", "text": "?"}]}],
        [("user", "words\n?")]),
    "an empty turn": ("messages", [{"role": "user", "content": None}, {"role": "assistant", "content": []}, USER],
        [("user", ""), ("assistant", ""), REQUESTED]),
    "an output of parts": ("responses", [USER, item(), output([{"type": "input_text", "text": "r"},
        {"type": "input_image", "image_url": "x"}])], [REQUESTED, CALL, ("tool", f"r{IMAGE}", "c")]),
    "an output that is null or an object": ("responses", [USER, item(arguments=None), output(None),
        item(arguments={"a": 1}), output({"b": 2})],
        [REQUESTED, CALL, ("tool", "", "c"), ("assistant", "", ("f", "c", {"a": 1})), ("tool", '{"b": 2}', "c")]),
    "items of other tools": ("responses", [USER, {"type": "web_search_call", "id": "w"},
        {"type": "mcp_list_tools", "id": "m"},
        {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c", "output": "r"}],
        [REQUESTED, ("assistant", "", ("local_shell", "c", {"command": ["ls"]})), RESULT]),
    "a refusal among the items": ("responses", [USER,
        {"type": "reasoning", "summary": [], "encrypted_content": "other"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, USER],
        [REQUESTED, ("assistant", "no"), REQUESTED]),
    "a damaged item": ("responses", [USER, item(arguments="{"), output("r")],
        [REQUESTED, ("assistant", "", ("f", "c", {"invalid_arguments": "{"})), RESULT]),
    "pictures of Ollama's": ("ollama", [{"role": "user", "content": "what?", "images": ["aGk="]},
        {"role": "assistant", "content": "a"}, USER],
        [("user", f"{IMAGE}what?"), ("assistant", "a"), REQUESTED]),
    "calls without ids, results by name": ("ollama", [USER, ollama_call(arguments='{"a": 1}'),
        {"role": "tool", "tool_name": "f", "content": "r"}],
        [REQUESTED, ("assistant", "", ("f", "call00000", {"a": 1})), ("tool", "r", "call00000")]),
    "roles of Ollama's": ("ollama", [{"role": "developer", "content": "s"}, {"role": "user", "content": None},
        {"role": "assistant", "content": "a", "thinking": "hm"}, USER],
        [("system", "s"), ("user", ""), ("assistant", "a", "hm"), REQUESTED]),
}  # fmt: skip


def as_row(turn: dict[str, Any]) -> tuple[Any, ...]:
    """Role and content; then the thinking, the calls, or the id."""
    calls = [(c["function"]["name"], c["id"], c["function"]["arguments"]) for c in turn.get("tool_calls", ())]
    thinking = [turn["reasoning"]] if "reasoning" in turn else []
    ids = [turn["tool_call_id"]] if turn["role"] == "tool" else []
    return turn["role"], turn["content"], *thinking, *calls, *ids


def send(base: str, api: str, messages: list[Any]) -> Any:
    body = {"model": "fake-tales", "stream": False, "input" if api == "responses" else "messages": messages}
    body |= {"max_tokens": 2} if api == "messages" else {}
    return HTTP.post(base + PATHS[api], json=body)


@pytest.mark.parametrize("kind", SENT)
def test_foreign_keys_are_accepted(served: tuple[str, FakeEngine], kind: str) -> None:
    base, engine = served
    api, messages, expected = SENT[kind]
    answer = send(base, api, messages)
    assert answer.status_code == 200, answer.text
    assert [as_row(turn) for turn in engine.tokenizer.rendered[0]] == expected


@pytest.mark.parametrize(
    ("api", "message"),
    [
        ("chat", {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
        ("messages", {"role": "user", "content": [{"type": "image", "source": PNG}]}),
        ("responses", {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}),
        ("ollama", {"role": "user", "content": "", "images": ["aGk="]}),
    ],
)
def test_a_question_without_words_is_refused(served: tuple[str, FakeEngine], api: str, message: Any) -> None:
    base, engine = served
    for limit, why in ((4, "no picture encoder"), (0, "takes no pictures (--limit-mm-per-prompt")):
        engine.config = replace(engine.config, limit_mm_per_prompt=f'{{"image": {limit}}}')
        answer = send(base, api, [message])
        assert why in answer.text
        assert "this model reads text only" in answer.text
        assert answer.status_code == 400
    # The conversation goes on with the next question.
    assert send(base, api, [message, {"role": "assistant", "content": "?"}, USER]).status_code == 200


def test_a_partial_answer_is_continued_in_every_api(served: tuple[str, FakeEngine]) -> None:
    base, _ = served
    for more in ({"prefix": True}, {"partial": True}):
        answer = send(base, "chat", [USER, {"role": "assistant", "content": "a"} | more])
        assert "CONTINUE" in answer.text or answer.json()["choices"][0]["message"]["content"].startswith(
            "go a"
        )


def test_half_a_character_in_a_body_is_replaced(served: tuple[str, FakeEngine]) -> None:
    base, engine = served
    body = rb'{"model": "fake-tales", "messages": [{"role": "user", "content": "cut \ud83d"}]}'
    answer = HTTP.post(base + PATHS["chat"], content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert engine.tokenizer.rendered[0][0]["content"] == "cut �"


def test_a_repair_is_logged_once(served: tuple[str, FakeEngine], caplog: pytest.LogCaptureFixture) -> None:
    base, _ = served
    repairs.report.cache_clear()
    with caplog.at_level(logging.WARNING, "twofold.server"):
        for _ in range(2):
            send(base, "chat", SENT["a damaged call"][1])
    reported = [record.message for record in caplog.records if "repaired a conversation" in record.message]
    assert len(reported) == 1
    assert "invalid_arguments" in reported[0] or "JSON object" in reported[0]
