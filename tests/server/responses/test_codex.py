"""A session of Codex, as its public sources write requests and read answers, with the bundled model's weights.

The model is too small to call tools, so the session's calls are a script; everything else is what it says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from live_server import HTTP, serving
from twofold.api.config import EngineConfig, ServerConfig
from twofold.engine import Engine
from twofold.models.bundled import bundled_model_path
from twofold.server.app import create_app

NUM_TURNS = 20
EDITED = 8
"""The turn whose question is edited when the session is resumed."""
PAGE = 16
CONTEXT = 24_576
SYSTEM_TOKENS = 10_000
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' + messages[0]['content'] + '\\n<tools>' + (tools | tojson) + '</tools><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if not (loop.first and tools) %}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""  # noqa: E501
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "shell",
        "description": "Runs a command",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "array", "items": {"type": "string"}}},
            "required": ["command"],
        },
    },
    {"type": "custom", "name": "apply_patch", "description": "Edits files", "format": {"type": "text"}},
    {"type": "web_search", "external_web_access": False},
    {"type": "namespace", "name": "mcp__notes__", "description": "", "tools": [
        {"type": "function", "name": "add", "description": "Keeps a note", "parameters": {"type": "object"}}
    ]},
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a longer context, and with a template that shows tools."""
    made = tmp_path_factory.mktemp("models") / "tales"
    made.mkdir()
    for file in bundled_model_path().iterdir():
        if file.suffix != ".jinja":
            (made / file.name).symlink_to(file)
    for name, more in (
        ("config.json", {"max_position_embeddings": CONTEXT}),
        ("tokenizer_config.json", {"model_max_length": CONTEXT, "chat_template": TEMPLATE}),
    ):
        reported = json.loads((made / name).read_text()) | more
        (made / name).unlink()
        (made / name).write_text(json.dumps(reported))
    return made


@contextmanager
def served(model: Path, *, caches: bool) -> Iterator[tuple[str, Engine]]:
    config = EngineConfig(
        model=str(model),
        accelerator="none",
        cpu_threads=2,
        max_total_tokens=2 * CONTEXT,
        page_size=PAGE,
        enable_prefix_caching=caches,
    )
    engine = Engine.load(config)
    engine.start()
    with serving(create_app(engine, ServerConfig(tool_call_parser="hermes"))) as url:
        yield url, engine
    engine.close()


def instructions(engine: Engine) -> str:
    tales = " ".join(
        f"Rule {number}: the {animal} asks the king before it opens door {number * 7}."
        for number, animal in enumerate(["fox", "wolf", "miller", "crow"] * 300)
    )
    ids = engine.tokenizer.encode(tales)
    assert len(ids) >= SYSTEM_TOKENS
    return engine.tokenizer.decode(ids[:SYSTEM_TOKENS])


def ask(url: str, system: str, history: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """One request in Codex's twelve fields; the items that were done, and what the usage says."""
    body = {
        "model": "tales",
        "instructions": system,
        "input": history,
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-conversation",
        "client_metadata": {"x-codex-installation-id": "0"},
        # Not Codex's: the model would go on for long.
        "temperature": 0,
        "max_output_tokens": 12,
    }
    items: list[dict[str, Any]] = []
    usage = None
    with HTTP.stream("POST", f"{url}/v1/responses", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] == "response.output_item.done":
                items.append(event["item"])
            elif event["type"] in ("response.completed", "response.incomplete"):
                usage = event["response"]["usage"]
    assert usage is not None, "a stream without its end is an error to Codex"
    details = usage["input_tokens_details"]
    return items, {"input": usage["input_tokens"], "cached": details["cached_tokens"]}


def sent_back(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers as Codex writes them into the next request."""
    return [{name: item[name] for name in ("type", "role", "content") if name in item} for item in items]


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def scripted_call(turn: int) -> list[dict[str, Any]]:
    """Calls in each of the forms that were offered, in turn."""
    call_id = f"call_{turn}"
    output: dict[str, Any] = {"call_id": call_id, "output": f"tale{turn}.txt\nExit code: 0"}
    if turn % 3 == 1:
        call = {"type": "custom_tool_call", "name": "apply_patch", "input": f"+line {turn}"}
        return [call | {"call_id": call_id}, {"type": "custom_tool_call_output"} | output]
    name = {"name": "add", "namespace": "mcp__notes__"} if turn % 3 == 2 else {"name": "shell"}
    arguments = json.dumps({"command": ["cat", f"tale{turn}.txt"]})
    call = {"type": "function_call", "arguments": arguments, "call_id": call_id} | name
    return [call, {"type": "function_call_output"} | output]


@pytest.mark.slow
def test_a_session_computes_what_is_new_and_answers_as_without_a_cache(model: Path) -> None:
    opening = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask first."}]},
        user("<environment_context>a wood</environment_context>"),
        user("Tell of the king."),
    ]
    requested: list[list[dict[str, Any]]] = []
    answers: list[list[dict[str, Any]]] = []
    usages: list[dict[str, int]] = []
    with served(model, caches=True) as (url, engine):
        system = instructions(engine)

        def turn(history: list[dict[str, Any]]) -> None:
            items, usage = ask(url, system, history)
            assert [item["type"] for item in items] == ["message"]
            requested.append(history)
            answers.append(sent_back(items))
            usages.append(usage)

        history = opening
        for number in range(NUM_TURNS):
            turn(list(history))
            history = [*history, *answers[-1], *scripted_call(number)]
            if number % 4 == 3:
                history.append(user(f"And then, number {number}?"))
        place = next(place for place, item in enumerate(history) if f"call_{EDITED}" == item.get("call_id"))
        edited = [*history]
        edited[place + 1] = edited[place + 1] | {"output": "another tale"}
        turn(edited)
    assert usages[0]["input"] > SYSTEM_TOKENS
    assert usages[0]["cached"] == 0
    for before, after in pairwise(usages[:NUM_TURNS]):
        assert before["input"] - PAGE <= after["cached"] < after["input"]
    # Up to the edit and not beyond: the next turn began with its output.
    assert usages[EDITED]["input"] - PAGE <= usages[-1]["cached"] < usages[EDITED + 1]["input"]
    with served(model, caches=False) as (url, _):
        for number in (0, 7, EDITED + 5, NUM_TURNS - 1, NUM_TURNS):
            items, usage = ask(url, system, requested[number])
            assert usage["cached"] == 0
            assert sent_back(items) == answers[number], f"turn {number}"
