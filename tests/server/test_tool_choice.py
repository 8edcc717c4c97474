"""Calls that a client forces, over a real socket with the bundled model, which has never seen a tool."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import HTTP, serving

pytest.importorskip("twofold._core", reason="the native module is not built")

from twofold.api.config import EngineConfig, ServerConfig
from twofold.engine import Engine
from twofold.models.bundled import bundled_model_path
from twofold.server.app import create_app

TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{%- endfor %}"
    "{{- '<|im_start|>assistant\n' }}{%- if thinks %}{{- '<think>\n' }}{%- endif %}"
)
QUESTION: list[Any] = [{"role": "user", "content": "a king"}]
AGE = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}}, "required": ["age"],
       "additionalProperties": False}  # fmt: skip
KIND = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"],
        "additionalProperties": False}  # fmt: skip
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "age", "parameters": AGE}},
    {"type": "function", "function": {"name": "kind", "parameters": KIND}},
]
WARM = {"temperature": 1.0, "max_tokens": 120}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = tmp_path_factory.mktemp("models") / "bundled"
    shutil.copytree(bundled_model_path(), model)
    for file in (model / "chat_template.jinja", model / "tokenizer_config.json"):
        if file.suffix == ".json":
            config = json.loads(file.read_text())
            config["chat_template"] = TEMPLATE
            file.write_text(json.dumps(config))
        else:
            file.unlink(missing_ok=True)
    made = Engine.load(EngineConfig(model=str(model), accelerator="none", cpu_threads=2))
    made.start()
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
            model=client.models.list().data[0].id, messages=QUESTION, tools=TOOLS, tool_choice="required",
            parallel_tool_calls=False, temperature=1.0, seed=2, max_tokens=400,
        ) as stream,
    ):  # fmt: skip
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert valid(choice.message.tool_calls[0].function.to_dict())


@pytest.mark.parametrize(
    ("dialect", "more", "param"),
    [
        ("hermes", {"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ("hermes", {"tool_choice": "any"}, "tool_choice"),
        ("hermes", {"tool_choice": "required", "tools": []}, "tool_choice"),
        ("hermes", {"tool_choice": "required", "tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}}]}, "tool_choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_forced_is_refused(
    engine: Engine, dialect: str, more: dict[str, Any], param: str
) -> None:
    with serving(create_app(engine, ServerConfig(tool_call_parser=dialect))) as base:
        body = {"messages": QUESTION, "tools": TOOLS} | more
        response = HTTP.post(f"{base}/v1/chat/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_form_is_held_behind_the_thinking(engine: Engine) -> None:
    """The model need not think; where the prompt has begun to, it writes what it likes until it ends that."""
    form = {"messages": QUESTION, "guided_choice": ["yes", "no"]} | WARM
    with serving(create_app(engine, ServerConfig(reasoning_parser="qwen3"))) as base:
        for thinks in (False, True):
            body = form | {"chat_template_kwargs": {"thinks": thinks}}
            said = [
                HTTP.post(f"{base}/v1/chat/completions", json=body | {"seed": seed}).json()["choices"][0]
                for seed in range(5)
            ]
            for answer in said:
                if answer["finish_reason"] == "stop":
                    assert answer["message"]["content"] in ("yes", "no")
                else:
                    assert not answer["message"]["content"]
            assert any(
                answer["message"]["reasoning"] if thinks else answer["message"]["content"] for answer in said
            )
