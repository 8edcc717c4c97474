"""Calls that a client forces, over a real socket with the bundled model, which has never seen a tool."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import HTTP, serving
from tool_model import QUESTION, TOOLS, WARM, started
from twofold.api.config import ServerConfig
from twofold.engine import Engine
from twofold.server.app import create_app


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = started(tmp_path_factory.mktemp("models"))
    yield made
    made.close()


def valid(call: Any) -> bool:
    arguments = json.loads(call["arguments"])
    if call["name"] == "age":
        return list(arguments) == ["age"] and 1 <= arguments["age"] <= 99
    return bool(call["name"] == "kind" and arguments in ({"kind": "cat"}, {"kind": "dog"}))


@pytest.mark.parametrize("dialect", ["hermes", "qwen3_coder", "mistral", "llama4_pythonic"])
def test_forced_calls_are_all_that_comes(engine: Engine, dialect: str) -> None:
    config = ServerConfig(tool_call_parser=dialect, reasoning_parser="qwen3")
    with serving(create_app(engine, config)) as base:
        named = {"type": "function", "function": {"name": "kind"}}
        for choice, names in (("required", {"age", "kind"}), (named, {"kind"})):
            for seed in range(2):
                body = {"messages": QUESTION, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False,
                        "seed": seed, "logprobs": seed == 0} | WARM  # fmt: skip
                response = HTTP.post(f"{base}/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                (answer,) = response.json()["choices"]
                if answer["finish_reason"] == "length":  # it thinks on
                    continue
                (call,) = answer["message"]["tool_calls"]
                assert not answer["message"]["content"]
                assert call["function"]["name"] in names
                assert valid(call["function"])
                assert answer["finish_reason"] == "tool_calls"


def test_openais_client_forces_a_call_in_a_stream(engine: Engine) -> None:
    with (
        serving(create_app(engine, ServerConfig(tool_call_parser="hermes"))) as base,
        openai.OpenAI(base_url=f"{base}/v1", api_key="-", max_retries=0, timeout=60) as client,
        client.chat.completions.stream(
            model=client.models.list().data[0].id,
            messages=QUESTION,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=1.0,
            seed=2,
            max_tokens=400,
        ) as stream,
    ):
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert valid(choice.message.tool_calls[0].function.to_dict())


@pytest.mark.parametrize(
    ("dialect", "more", "param"),
    [
        ("hermes", {"tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "tool_choice"),
        ("hermes", {"tool_choice": "any"}, "tool_choice"),
        ("hermes", {"tool_choice": "required", "tools": []}, "tool_choice"),
        ("hermes", {"tool_choice": "required", "tools": [{"type": "function", "function": {
            "name": "f", "strict": True,
            "parameters": {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}}}]}, "tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_forced_is_refused(
    engine: Engine, dialect: str, more: dict[str, Any], param: str
) -> None:
    with serving(create_app(engine, ServerConfig(tool_call_parser=dialect))) as base:
        body = {"messages": QUESTION, "tools": TOOLS} | more
        response = HTTP.post(f"{base}/v1/chat/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_format_is_enforced_after_the_thinking(engine: Engine) -> None:
    """The model need not think; where the prompt has begun to, it writes what it likes until it ends that."""
    form = {"messages": QUESTION, "guided_choice": ["yes", "no"]} | WARM
    with serving(create_app(engine, ServerConfig(reasoning_parser="qwen3"))) as base:
        for thinks in (False, True):
            body = form | {"chat_template_kwargs": {"thinks": thinks}}
            reply = [
                HTTP.post(f"{base}/v1/chat/completions", json=body | {"seed": seed}).json()["choices"][0]
                for seed in range(5)
            ]
            for answer in reply:
                if answer["finish_reason"] == "stop":
                    assert answer["message"]["content"] in ("yes", "no")
                else:
                    assert not answer["message"]["content"]
            assert any(
                answer["message"]["reasoning"] if thinks else answer["message"]["content"] for answer in reply
            )


@pytest.mark.parametrize("variables", [{"closed": True}, {"enable_thinking": False}])
@pytest.mark.parametrize(
    "more",
    [{"guided_choice": ["yes", "no"]}, {"tools": TOOLS, "tool_choice": "required"}],
    ids=["form", "call"],
)
def test_thinking_that_is_over_or_off_begins_no_second_time(
    engine: Engine, variables: dict[str, Any], more: dict[str, Any]
) -> None:
    """The tokens of <think> are biased to: where the grammar takes them, the model thinks."""
    wanted = engine.tokenizer.encode("<think>")
    body: dict[str, Any] = (
        WARM
        | more
        | {
            "messages": QUESTION,
            "temperature": 0,
            "parallel_tool_calls": False,
            "logit_bias": dict.fromkeys(wanted, 40),
        }
    )
    with serving(
        create_app(engine, ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3"))
    ) as base:
        thinking = HTTP.post(f"{base}/v1/chat/completions", json=body).json()
        answer = HTTP.post(
            f"{base}/v1/chat/completions", json=body | {"chat_template_kwargs": variables}
        ).json()
    assert thinking["choices"][0]["message"]["reasoning"]
    (choice,) = answer["choices"]
    assert choice["message"]["reasoning"] is None
    if "tools" in more:
        assert choice["message"]["tool_calls"]
    else:
        assert choice["message"]["content"] in ("yes", "no")


TEXT = {"type": "object", "properties": {"text": {"type": "string", "minLength": 600}}, "required": ["text"]}


@pytest.mark.parametrize("num_tokens", [3, 9, 30, 60])
def test_a_forced_call_that_is_cut_is_never_text(engine: Engine, num_tokens: int) -> None:
    """Same at every API: the finish reason is length, and the call is returned as far as it was written."""
    question = {"temperature": 0, "chat_template_kwargs": {"closed": True}}
    function = {"name": "write", "parameters": TEXT}
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": QUESTION, "tools": [{"type": "function", "function": function}],
                             "tool_choice": "required", "max_tokens": num_tokens} | question,
        "messages": {"model": "bundled", "messages": QUESTION, "tools": [{"name": "write", "input_schema": TEXT}],
                     "tool_choice": {"type": "any"}, "temperature": 0, "max_tokens": num_tokens},
        "responses": {"input": QUESTION, "tools": [{"type": "function"} | function], "tool_choice": "required",
                      "max_output_tokens": num_tokens} | question,
    }  # fmt: skip
    reply, streams = {}, {}
    with serving(
        create_app(engine, ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3"))
    ) as base:
        for path, body in bodies.items():
            response = HTTP.post(f"{base}/v1/{path}", json=body)
            assert response.status_code == 200, response.text
            reply[path] = response.json()
            streams[path] = HTTP.post(f"{base}/v1/{path}", json=body | {"stream": True}).text
            assert "tool_call>" not in response.text + streams[path]
    (choice,) = reply["chat/completions"]["choices"]
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]
    calls = choice["message"].get("tool_calls", [])
    assert reply["messages"]["stop_reason"] == "max_tokens"
    assert reply["responses"]["status"] == "incomplete"
    begun = num_tokens >= 30
    assert [call["function"]["name"] for call in calls] == ["write"] * begun
    assert [block["name"] for block in reply["messages"]["content"]] == ["write"] * begun
    assert [(item["name"], item["status"]) for item in reply["responses"]["output"]] == [
        ("write", "incomplete")
    ] * begun
    signs = ('"tool_calls"', '"type":"tool_use"', "response.output_item.done")
    assert [sign in text for sign, text in zip(signs, streams.values(), strict=True)] == [begun] * 3
    if num_tokens == 60:
        written = calls[0]["function"]["arguments"]
        assert written.split()[:2] == ["{", '"text":']
        assert written == reply["responses"]["output"][0]["arguments"]
        assert len(reply["messages"]["content"][0]["input"]["text"]) > 20
