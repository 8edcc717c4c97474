"""What `twofold serve` says when it is ready, and how a model's text reaches a terminal."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

import pytest
from twofold.api.config import EngineConfig, ServerConfig
from twofold.api.types import RunInfo
from twofold.tools.cli.serve import greeting as greetings
from twofold.tools.cli.serve.greeting import Server, addresses
from twofold.tools.cli.terminal_text import harmless

INFO = RunInfo(
    model="/models/tales",
    architecture="Qwen3MoeForCausalLM",
    accelerator="none",
    accelerator_reason="asked for",
    clock="wall",
    policy="",
    num_layers=6,
    num_experts=32,
    top_k=4,
    num_slots=0,
    expert_bytes=98_304,
    cpu_isa="avx2",
    cpu_threads=2,
    version="0",
    config_json="{}",
)
URL = "http://127.0.0.1:1/v1"


def greeting(
    info: RunInfo = INFO,
    url: str = URL,
    *,
    telemetry_url: str | None = None,
    server: ServerConfig | None = None,
    can_chat: bool = True,
    **engine: Any,
) -> str:
    """The greeting of a server with the model `tales`; engine: its flags."""
    listening = Server(url, server or ServerConfig(), telemetry_url)
    return greetings.greeting(info, "tales", listening, EngineConfig(**engine), can_chat=can_chat)


def row(text: str, label: str) -> str:
    (found,) = [line for line in text.splitlines() if line.startswith(f"  {label} ")]
    return found.removeprefix(f"  {label}").strip()


def test_without_an_accelerator_all_experts_run_on_the_cpu():
    reported = greeting()
    assert "all 192 run on the CPU" in reported
    assert "telemetry    off" in reported
    assert "emulated" not in reported
    assert "warning" not in reported
    assert "adapters" not in reported


def test_adapters_are_named():
    reported = greeting(lora_modules=("a=/x", "b=/y"))
    assert row(reported, "adapters") == "a, b: requests choose by their model"
    assert '"model": "a"' in row(reported, "try")
    assert row(greeting(lora_dir="/z"), "adapters") == "more from /z while it runs"


def test_an_accelerators_slots_and_emulation_are_reported():
    emulated = dataclasses.replace(INFO, accelerator="emulated:rtx4090-pcie4", policy="lru", num_slots=48)
    reported = greeting(emulated, telemetry_url="sqlite:///t.db")
    assert "48 of 192 have a slot in VRAM (25 %), policy lru" in reported
    assert "note: the GPU is emulated" in reported
    assert "For real times: --accelerator none" in reported


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [("0.0.0.0", (), True), ("0.0.0.0", ("k",), False), ("::1", (), False), ("localhost", (), False)],
)
def test_an_open_server_without_a_key_is_warned_of(host, key, warned):
    reported = greeting(server=ServerConfig(host=host, api_key=key))
    assert ("--api-key" in reported) is warned


def test_a_models_text_cannot_steer_the_terminal():
    assert harmless("a\tb\nc é 狐") == "a\tb\nc é 狐"
    assert harmless("\x1b[2J\x07\x9b") == "\ufffd[2J\ufffd\ufffd"


def test_the_databases_password_is_not_shown():
    reported = greeting(telemetry_url="postgresql://me:secret@db.example/t")
    assert "secret" not in reported
    assert "postgresql://me:***@db.example/t" in reported


def test_the_accelerator_is_shown_as_it_was_asked_for():
    assert row(greeting(), "accelerator") == "auto → none: asked for"
    assert row(greeting(accelerator="none"), "accelerator") == "none: asked for"


@pytest.mark.parametrize(("wildcard", "own"), [("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]")])
def test_a_wildcard_is_shown_as_an_address_that_can_be_opened(monkeypatch, wildcard, own):
    monkeypatch.setattr(greetings, "_own_address", lambda wildcard: "10.1.2.3")
    url = f"http://{wildcard}:10002/v1"
    assert addresses(url) == f"http://{own}:10002/v1 (from other machines: http://10.1.2.3:10002/v1)"
    reported = greeting(url=url)
    assert row(reported, "chat").startswith(f"http://{own}:10002/ ")
    assert row(reported, "try").startswith(f"curl http://{own}:10002/v1/chat/completions ")
    monkeypatch.setattr(greetings, "_own_address", lambda wildcard: "")
    assert addresses(url) == f"http://{own}:10002/v1"


def test_another_address_is_shown_as_it_is():
    assert addresses("https://10.0.0.5:443/v1") == "https://10.0.0.5:443/v1"


@pytest.mark.parametrize("can_chat", [True, False])
def test_the_command_to_try_is_a_request_of_the_model(can_chat):
    shown = greetings._curl(URL, 'it\'s "tales"', ServerConfig(api_key=("secret",)), can_chat=can_chat)
    words = shlex.split(shown)
    body = json.loads(words[-1])
    assert words[1] == f"{URL}/chat/completions" if can_chat else f"{URL}/completions"
    assert body["model"] == 'it\'s "tales"'
    assert ("messages" in body, "prompt" in body) == (can_chat, not can_chat)
    assert "Authorization: Bearer KEY" in words
    assert "secret" not in shown


def test_speculation_is_shown_or_how_to_turn_it_on():
    assert "--speculative-config" in row(greeting(), "speculation")
    on = greeting(speculative_config='{"method": "ngram", "num_speculative_tokens": 4}')
    assert row(on, "speculation") == "ngram, at most 4 tokens drafted"


def test_the_dashboards_command_shows_the_recorded_database():
    recorded = row(greeting(telemetry_url="sqlite:///t.db"), "dashboard")
    assert recorded == "twofold dashboard --telemetry-url sqlite:///t.db, then http://127.0.0.1:8501"
    assert row(greeting(), "dashboard").startswith("none without a database: serve with --telemetry-url ")
