"""A session as Claude Code's public documentation tells of it, with the bundled model: a system prompt of 10,000
tokens, twenty turns with tools, an edit in the middle. What the cache knows grows, and changes no answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live_server import serving
from twofold.api.config import EngineConfig, ServerConfig
from twofold.engine import Engine
from twofold.models.bundled import bundled_model_path
from twofold.server.app import create_app

CONTEXT = 20_000
TURNS = 20
EDITED_AT = 10
PAGE = 16
NAMES = ("twofold-tales", "claude-tales", "claude-small")
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
{%- if message.role == 'tool' %}{{- '<tool_response>' + message.content + '</tool_response>' }}
{%- else %}{{- message.content }}{%- endif %}
{%- if loop.first and tools %}{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function %}
{{- '<tool_call>{"name": "' + function.name + '", "arguments": ' + function.arguments | tojson + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": f"{name} a file",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
    for name in ("Read", "Edit", "Bash")
]
SYSTEM = " ".join(
    f"Rule {number}: the king walked into the forest and found the fox." for number in range(560)
)


def model_with_tools(folder: Path) -> Path:
    """The bundled model with room for the session, and a template that shows tools."""
    source = bundled_model_path()
    for file in source.iterdir():
        if file.name not in ("config.json", "chat_template.jinja"):
            (folder / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@contextmanager
def session(model: Path, *, caches: bool) -> Iterator[Any]:
    """A client of a server with and without a prefix cache."""
    import anthropic

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
    try:
        app = create_app(engine, ServerConfig(served_model_name=NAMES, api_key=("key",)))
        with serving(app) as url, anthropic.Anthropic(base_url=url, auth_token="key", timeout=300) as client:
            yield client
    finally:
        engine.close()


def play(client: Any) -> tuple[list[str], list[Any]]:
    """Texts and usages of the turns."""
    headers = {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"}
    probe = client.beta.messages.create(
        model=NAMES[2], max_tokens=1, messages=[{"role": "user", "content": "quota"}], extra_headers=headers
    )
    assert probe.stop_reason == "max_tokens"
    messages: list[Any] = []
    given: Any = [
        {"type": "text", "text": "<system-reminder>be good</system-reminder>"},
        {"type": "text", "text": "Go."},
    ]
    texts, usages = [], []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": given})
        if turn == EDITED_AT:
            # What a tool gave long ago is cleared.
            messages[EDITED_AT]["content"] = [messages[EDITED_AT]["content"][0] | {"content": "[cleared]"}]
        marked = [
            {"type": "ephemeral"} if place == len(messages) - 1 else None for place in range(len(messages))
        ]
        sent = [
            message | {"content": [message["content"][0] | {"cache_control": mark}, *message["content"][1:]]}
            for message, mark in zip(messages, marked, strict=True)
        ]
        prompt: dict[str, Any] = {
            "model": NAMES[1],
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.0; cch={turn:05x};"},
                {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
            ],
            "tools": TOOLS,
            "messages": sent,
        }
        with client.beta.messages.stream(
            **prompt,
            max_tokens=24,
            metadata={"user_id": "user_1_session_2"},
            extra_headers=headers,
            extra_body={"temperature": 0},
        ) as stream:
            answer = stream.get_final_message()
        counted = client.beta.messages.count_tokens(**prompt).input_tokens
        assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
        texts.append("".join(block.text for block in answer.content if block.type == "text"))
        usages.append(answer.usage)
        # The bundled model knows no tools: the call is supplied instead.
        use = {
            "type": "tool_use",
            "id": f"toolu_{turn}",
            "name": "Read",
            "input": {"path": f"/tale/{turn}.txt"},
        }
        content = [{"type": "text", "text": texts[-1] or "…"}, use]
        messages.append({"role": "assistant", "content": content})
        story = f"Line {turn}: " + "the miller asked the cat for a golden coin. " * 3
        given = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": story, "is_error": turn % 5 == 4}
        ]
    return texts, usages


@pytest.mark.slow
def test_a_session_computes_only_new_tokens_of_each_turn(tmp_path: Path) -> None:
    model = model_with_tools(tmp_path)
    with session(model, caches=True) as client:
        texts, usages = play(client)
    totals = [usage.input_tokens + usage.cache_read_input_tokens for usage in usages]
    assert totals[0] > 10_000
    assert usages[0].cache_read_input_tokens < PAGE
    assert sorted(totals[:EDITED_AT]) == totals[:EDITED_AT]
    for turn in range(1, TURNS):
        known = usages[turn].cache_read_input_tokens
        if turn == EDITED_AT:
            assert 10_000 < known < totals[turn - 1] - 100, "what was before the edit"
        else:
            assert known >= totals[turn - 1] - PAGE, f"turn {turn} began like the one before"
    assert len(set(texts)) > 1
    with session(model, caches=False) as client:
        assert play(client)[0] == texts
