"""What `twofold serve` says when it is ready, and how a model's text reaches a terminal."""

from __future__ import annotations

import dataclasses

import pytest
from twofold.api.config import ServerConfig
from twofold.api.types import RunInfo
from twofold.tools.cli.serve.command import greeting
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


def test_without_an_accelerator_all_experts_run_on_the_cpu():
    reported = greeting(INFO, "tales", URL, telemetry_url=None, server_config=ServerConfig())
    assert "all 192 run on the CPU" in reported
    assert "telemetry    off" in reported
    assert "emulated" not in reported
    assert "warning" not in reported
    assert "adapters" not in reported


def test_adapters_are_named():
    reported = greeting(
        INFO, "tales", URL, telemetry_url=None, server_config=ServerConfig(), adapters=("a", "b")
    )
    assert "adapters     a, b" in reported


def test_an_accelerators_slots_and_emulation_are_reported():
    emulated = dataclasses.replace(INFO, accelerator="emulated:rtx4090-pcie4", policy="lru", num_slots=48)
    reported = greeting(emulated, "tales", URL, telemetry_url="sqlite:///t.db", server_config=ServerConfig())
    assert "48 of 192 have a slot in VRAM (25 %), policy lru" in reported
    assert "note: the GPU is emulated" in reported


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [("0.0.0.0", (), True), ("0.0.0.0", ("k",), False), ("::1", (), False), ("localhost", (), False)],
)
def test_an_open_server_without_a_key_is_warned_of(host, key, warned):
    reported = greeting(
        INFO, "tales", URL, telemetry_url=None, server_config=ServerConfig(host=host, api_key=key)
    )
    assert ("--api-key" in reported) is warned


def test_a_models_text_cannot_steer_the_terminal():
    assert harmless("a\tb\nc é 狐") == "a\tb\nc é 狐"
    assert harmless("\x1b[2J\x07\x9b") == "\ufffd[2J\ufffd\ufffd"


def test_the_databases_password_is_not_shown():
    reported = greeting(
        INFO, "tales", URL, telemetry_url="postgresql://me:secret@db.example/t", server_config=ServerConfig()
    )
    assert "secret" not in reported
    assert "postgresql://me:***@db.example/t" in reported
