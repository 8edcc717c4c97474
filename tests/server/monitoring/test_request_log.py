"""One line per refused request, and per request with --log-requests: its names and amounts, never its texts."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.api.errors import CapacityError, KernelError
from twofold.server.app import create_app
from twofold.server.bridge.observe import request_log
from twofold.server.bridge.observe.request_log import RequestLog

CHAT = "/v1/chat/completions"
SECRET = "xyzzysecret"
HELLO = [{"role": "user", "content": "hello there"}]


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, logger="twofold.server"):
        yield


def logged(caplog: pytest.LogCaptureFixture, at_least: int = 0) -> list[dict[str, Any]]:
    """Fields of the lines of requests; each line's text has its status and names.

    at_least: waits for so many lines, which are written after the answer was sent.
    """
    deadline = time.monotonic() + 20
    while len(found := _lines(caplog)) < at_least:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.005)
    return found


def _lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = []
    for record in list(caplog.records):
        fields = getattr(record, "fields", {})
        if "status" in fields:
            assert f"{fields['status']} {fields['method']} {fields['route']}" in record.getMessage()
            found.append(fields | {"level": record.levelname, "text": record.getMessage()})
    return found


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (CHAT, {"model": "m", "messages": []}, 400, "messages: list should have at least 1"),
        (CHAT, {"messages": HELLO, "model": "gpt"}, 404, "the model 'gpt' does not exist"),
        ("/v1/messages", {"model": "m", "messages": 3, "max_tokens": 9}, 400, "messages"),
        ("/api/chat", {"model": "m", "messages": 3}, 400, "messages"),
        ("/v1/embeddings", {"model": "m", "input": ""}, 400, "input"),
    ],
)
def test_a_refused_request_is_one_line_with_its_names(shared, caplog, path, body, status, words):
    answer = HTTP.post(shared[0] + path, json=body, headers={"user-agent": "Goose/1.2 (Linux)"})
    assert answer.status_code == status
    (line,) = logged(caplog, 1)
    assert (line["status"], line["route"], line["model"]) == (status, path, body["model"])
    assert (line["client"], line["level"]) == ("Goose/1.2 (Linux)", "WARNING")
    assert words in line["problem"]
    assert f"model={body['model']} client=Goose/1.2 (Linux): " in line["text"]
    assert line["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("error", "status", "level"),
    [(CapacityError("full"), 429, "WARNING"), (KernelError("a kernel failed"), 500, "ERROR")],
)
def test_an_engines_refusal_has_its_reason(url, engine, caplog, error, status, level):
    engine.fail_on_submit = error
    assert HTTP.post(url + CHAT, json={"messages": HELLO}).status_code == status
    (line,) = logged(caplog, 1)
    assert (line["status"], line["level"], line["problem"]) == (status, level, str(error))


def test_an_error_in_a_stream_is_logged_although_its_status_was_sent(url, engine, caplog):
    engine.fail_after_words = 1
    answer = HTTP.post(url + CHAT, json={"messages": HELLO, "stream": True})
    assert answer.status_code == 200
    (line,) = logged(caplog, 1)
    assert (line["status"], line["level"]) == (500, "ERROR")
    assert line["problem"] in answer.text


def _with_secrets() -> Iterator[tuple[str, Any]]:
    text = {"role": "user", "content": SECRET}
    yield CHAT, {"messages": SECRET}
    yield CHAT, {"messages": [SECRET]}
    yield CHAT, {"messages": [text], "temperature": SECRET}
    yield CHAT, {"messages": [text], "stop": {"a": SECRET}}
    yield CHAT, {"messages": [text], "tools": [SECRET]}
    yield CHAT, {"messages": [text], "response_format": {"type": SECRET}}
    yield CHAT, {"messages": [text], "logit_bias": {SECRET: 1}}
    yield CHAT, {"messages": [text], "max_tokens": 0}
    yield CHAT, {"messages": [text], "model": "other"}
    yield "/v1/completions", {"prompt": {"a": SECRET}}
    yield "/v1/responses", {"input": [{"type": SECRET}]}
    yield "/v1/messages", {"max_tokens": 5, "system": 3, "messages": [text | {"role": SECRET}]}
    yield "/api/chat", {"model": "m", "messages": [text], "keep_alive": SECRET}
    yield "/v1/rerank", {"query": {"a": SECRET}, "documents": [SECRET]}


@pytest.mark.parametrize(("path", "body"), list(_with_secrets()))
def test_no_line_holds_a_text_of_the_request(shared, caplog, path, body):
    answer = HTTP.post(shared[0] + path, json=body, headers={"authorization": f"Bearer {SECRET}"})
    assert answer.status_code in (400, 404)
    assert len(logged(caplog, 1)) == 1
    assert SECRET not in caplog.text
    assert SECRET not in json.dumps(logged(caplog))


def test_no_line_holds_a_key(engine, caplog):
    with serving(create_app(engine, ServerConfig(api_key=(SECRET,)))) as base:
        assert HTTP.get(f"{base}/v1/models", headers={"x-api-key": f"{SECRET}2"}).status_code == 401
    (line,) = logged(caplog, 1)
    assert "needs the server's API key" in line["problem"]
    assert SECRET not in caplog.text


def test_a_client_cannot_write_lines_or_escape_sequences(shared, caplog):
    agent = "evil\u009b2J " + "x" * 500
    request = httpx.Request(
        "GET", f"{shared[0]}/nix%0aERROR%1b[2J", headers={"user-agent": agent.encode("latin-1")}
    )
    assert HTTP.send(request).status_code == 404
    (line,) = logged(caplog, 1)
    assert line["text"].isprintable()
    assert len(line["client"]) <= 80


def test_a_flood_of_refusals_is_bounded_and_counted(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(request_log.time, "monotonic", lambda: now[0])
    log = RequestLog(logs_all=False)
    scope = {"method": "GET", "path": "/nix", "headers": []}
    for _ in range(80):
        log.write(scope, 404, "id")
    assert len(logged(caplog)) == 50
    now[0] += 1
    log.write(scope, 404, "id")
    assert len(logged(caplog)) == 51
    assert "30 more refused requests were not logged" in caplog.text


def test_probes_are_logged_only_when_refused(caplog):
    with serving(create_app(None, ServerConfig(log_requests=True))) as base:
        assert HTTP.get(f"{base}/health").status_code == 503
        assert logged(caplog) == []
        assert HTTP.post(f"{base}/health").status_code == 405
    assert [line["status"] for line in logged(caplog)] == [405]


@pytest.mark.parametrize("stream", [False, True])
def test_each_answered_request_is_one_line_with_its_amounts(engine: FakeEngine, caplog, stream):
    with serving(create_app(engine, ServerConfig(log_requests=True))) as base:
        body = {"messages": [{"role": "user", "content": "one two three"}], "stream": stream, "n": 2}
        assert HTTP.post(base + CHAT, json=body).status_code == 200
        assert HTTP.get(f"{base}/v1/models").status_code == 200
    answered, listed = logged(caplog, 2)
    assert (answered["status"], answered["level"], answered["model"]) == (200, "INFO", "fake-tales")
    assert answered["prompt_tokens"] == 3  # one prompt with two answers
    assert answered["generated_tokens"] == 6
    assert answered["cached_tokens"] == 2
    assert 0 < answered["ttft_s"] <= answered["seconds"]
    assert answered["finish"] == "stop"
    assert "prompt=3 cached=2 generated=6 ttft=" in answered["text"]
    assert "one two" not in caplog.text
    assert listed["route"] == "/v1/models"


def test_the_hit_rate_is_that_of_the_requests_own_time(engine: FakeEngine, caplog):
    from dataclasses import replace

    counts = iter([(100, 100), (130, 110)])
    stats = engine.stats
    engine.stats = lambda: replace(  # type: ignore[method-assign]
        found := stats(),
        placement=replace(found.placement, **dict(zip(("hits", "cpu_misses"), next(counts), strict=True))),
    )
    with serving(create_app(engine, ServerConfig(log_requests=True))) as base:
        assert HTTP.post(f"{base}/v1/completions", json={"prompt": "one two"}).status_code == 200
    (line,) = logged(caplog, 1)
    assert line["expert_hit_rate"] == 0.75
    assert "experts hit 75%" in line["text"]


def test_answered_requests_are_not_logged_without_the_flag(engine, caplog):
    with serving(create_app(engine, ServerConfig())) as base:
        assert HTTP.post(base + CHAT, json={"messages": HELLO}).status_code == 200
    assert logged(caplog) == []
