"""Filling in the middle: `suffix` of /v1/completions and of Ollama's /api/generate, in each family's form."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.server.app import create_app

FORMS: dict[str, tuple[tuple[str, ...], str]] = {
    "Qwen": (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "0 before 1 after 2"),
    "DeepSeek": (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "0 before 1 after 2"),
    "StarCoder": (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "0 before 1 after 2"),
    "GLM": (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), "0 before 1 after 2"),
    "CodeLlama": (("▁<PRE>", "▁<SUF>", "▁<MID>"), "0 before 1 after 2"),
    "Seed-Coder": (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), "1 after 0 before 2"),
    "Codestral": (("[PREFIX]", "[SUFFIX]"), "1 after 0 before"),
}
FIRST_MARK = 1000
END = "<|endoftext|>"


def with_marks(engine: FakeEngine, marks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {mark: FIRST_MARK + number for number, mark in enumerate((*marks, END))}
    monkeypatch.setattr(type(engine.tokenizer), "token_id", lambda self, token: ids.get(token))
    monkeypatch.setattr(type(engine.tokenizer), "special_token_ids", frozenset(ids.values()))


def written(engine: FakeEngine) -> str:
    """The last prompt, with the numbers of its marks."""
    request = engine.requests[-1]
    tokens = request.prompt_token_ids
    return " ".join(
        str(token - FIRST_MARK) if token >= FIRST_MARK else engine.tokenizer.word(token) for token in tokens
    )


@pytest.mark.parametrize("family", FORMS)
def test_the_gap_is_between_the_models_marks(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    marks, prompt = FORMS[family]
    with_marks(engine, marks, monkeypatch)
    ollama: dict[str, Any] = {"model": "fake-tales", "stream": False, "think": False}
    with serving(create_app(engine, ServerConfig())) as url:
        for path, more in (
            ("/v1/completions", {}),
            ("/api/generate", ollama),
            ("/api/generate", ollama | {"raw": True}),
        ):
            body = {"prompt": "before", "suffix": "after"} | more
            if more.get("raw"):
                del body["think"]
            answer = HTTP.post(url + path, json=body)
            assert answer.status_code == 200, answer.text
            assert written(engine) == prompt
            assert set(engine.requests[-1].sampling.stop_token_ids) >= {
                FIRST_MARK + number for number in range(len(marks) + 1)
            }
        assert HTTP.post(f"{url}/v1/completions", json={"prompt": "", "suffix": "after"}).status_code == 200
        assert "before" not in written(engine)
        assert "insert" in HTTP.post(f"{url}/api/show", json={"model": "fake-tales"}).json()["capabilities"]


def test_a_model_without_marks_is_reported(engine: FakeEngine) -> None:
    with serving(create_app(engine, ServerConfig())) as url:
        for path in ("/v1/completions", "/api/generate"):
            body = {"model": "fake-tales", "prompt": "before", "suffix": "after"}
            answer = HTTP.post(url + path, json=body)
            assert (answer.status_code, "no marks" in answer.text) == (400, True)
        assert HTTP.post(f"{url}/v1/completions", json={"prompt": "before", "suffix": ""}).status_code == 200
        body = {"prompt": "before", "suffix": "after", "echo": True}
        assert HTTP.post(f"{url}/v1/completions", json=body).json()["error"]["param"] == "echo"
        assert HTTP.post(f"{url}/v1/completions", json={"prompt": ""}).json()["error"]["param"] == "prompt"
