"""Refused requests: OpenAI's error shape, the right status code, before any work has started."""

from __future__ import annotations

import json
import threading

import httpx
import openai
import pytest
from fake_engine import FakeEngine, ListSink
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.api.errors import CapacityError, KernelError, RequestError
from twofold.server.app import create_app
from twofold.server.openai.fields import FIELDS as TABLE

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
JSON_TYPE = {"content-type": "application/json"}


def refusal(response: httpx.Response, status: int) -> dict:
    """The error object of a refusal, whose shape is checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert "\n" not in error["message"]
    assert all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))
    return error


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CHAT, {}, "messages", "required"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "string"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
            "image: this model reads text only",
        ),
        (CHAT, {"messages": HELLO * 3000}, "messages", "at most 2048"),
        (CHAT, {"messages": HELLO, "temperature": -1}, "temperature", "-1"),
        (CHAT, {"messages": HELLO, "temperature": "hot"}, "temperature", "hot"),
        (CHAT, {"messages": HELLO, "top_p": -0.1}, "top_p", "greater than or equal to 0"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (CHAT, {"messages": HELLO, "stop": ["a"] * 1025}, "stop", "at most 1024"),
        (CHAT, {"messages": HELLO, "stop": ["a" * 1100]}, "stop[0]", "1024"),
        (CHAT, {"messages": HELLO, "stop": [5]}, "stop[0]", "string"),
        (TEXT, {}, "prompt", "required"),
        (TEXT, {"prompt": ""}, "prompt", "empty"),
        (TEXT, {"prompt": [-1]}, "prompt[0]", "greater than or equal to 0"),
    ],
)
def test_a_bad_field_is_400_and_named(url, path, body, param, words):
    error = refusal(HTTP.post(url + path, json=body), 400)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_stream_options_without_stream_are_refused(url):
    body = {"messages": HELLO, "stream_options": {"include_usage": True}}
    assert "stream: true" in refusal(HTTP.post(url + CHAT, json=body), 400)["message"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1", b"\xff\xfe", b"[" * 100_000, b'{"messages": NaN}', b'"text"', b"null", b"3"]
)
def test_a_body_that_is_no_json_object_is_400(url, content):
    refusal(HTTP.post(url + CHAT, content=content, headers=JSON_TYPE), 400)


def test_not_a_number_is_no_temperature(url):
    content = b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}'
    refusal(HTTP.post(url + CHAT, content=content, headers=JSON_TYPE), 400)


def test_a_large_body_is_413_with_and_without_its_length(engine):
    with serving(create_app(engine, ServerConfig(max_body_bytes=2048))) as url:
        content = json.dumps({"prompt": "a" * 3000}).encode()
        assert (
            refusal(HTTP.post(url + TEXT, content=content, headers=JSON_TYPE), 413)["code"]
            == "request_too_large"
        )
        pieces = (content[start : start + 500] for start in range(0, len(content), 500))
        refusal(HTTP.post(url + TEXT, content=pieces, headers=JSON_TYPE), 413)
        assert HTTP.post(url + TEXT, json={"prompt": "a " * 50}).status_code == 200
    assert len(engine.requests) == 1


def test_a_prompt_longer_than_the_context_is_400(url, engine):
    error = refusal(HTTP.post(url + TEXT, json={"prompt": "word " * 64, "stream": True}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "64 tokens" in error["message"]
    assert engine.requests == []


def test_a_template_that_refuses_is_400(url):
    body = {"messages": [{"role": "user", "content": "refuse me"}]}
    assert refusal(HTTP.post(url + CHAT, json=body), 400)["param"] == "messages"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (RequestError("token id 9 is outside the vocabulary", param="prompt"), 400, None, None),
        (CapacityError("all places are taken", retry_after_s=2.5), 429, "rate_limit_exceeded", "3"),
        (CapacityError("shutting down", draining=True), 503, "server_draining", "1"),
        (KernelError("the native code failed"), 500, "kernel_error", None),
        (ZeroDivisionError("a bug"), 500, "internal_error", None),
    ],
)
def test_what_the_engine_refuses_has_its_code_before_a_stream_starts(
    url, engine, stream, error, status, code, retry_after
):
    engine.fail_on_submit = error
    response = HTTP.post(url + TEXT, json={"prompt": "a", "stream": stream})
    assert refusal(response, status)["code"] == code
    assert response.headers.get("retry-after") == retry_after
    assert "division" not in response.text
    assert "Traceback" not in response.text


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"])
def test_a_full_server_refuses_before_it_reads(url, engine, path):
    engine.is_full = True
    response = HTTP.post(url + path, content=b"{", headers=JSON_TYPE)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert HTTP.post(f"{url}/tokenize", json={"prompt": "a"}).status_code == 200


def test_a_failure_after_the_start_is_an_error_event(engine, client, url):
    engine.fail_after_words = 2
    lines = HTTP.post(url + TEXT, json={"prompt": "a b c d", "stream": True}).text.split("\n\n")
    assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "engine_error"
    assert lines[-2] == "data: [DONE]"
    received = []
    stream = client.completions.create(model="fake-tales", prompt="a b c d", stream=True)
    with pytest.raises(openai.APIError, match="failed in layer 3"):
        received.extend(chunk.choices[0].text for chunk in stream)
    assert received == ["a ", "b "]


def test_a_failure_of_a_whole_answer_is_500(engine, url):
    engine.fail_after_words = 2
    error = refusal(HTTP.post(url + TEXT, json={"prompt": "a b c d"}), 500)
    assert error["message"] == "the native code failed in layer 3"


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1", 404), ("GET", CHAT, 405), ("PUT", "/x", 404)]
)
def test_other_paths_and_methods_have_the_same_shape(url, method, path, status):
    refusal(HTTP.request(method, url + path), status)


def test_nothing_is_allowed_across_origins(engine):
    """With a key, which a web page does not have; test_web_pages.py covers requests without one."""
    preflight = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    with serving(create_app(engine, ServerConfig(api_key=("sesame",)))) as url:
        response = HTTP.options(f"{url}/health", headers=preflight)
    assert response.status_code == 405
    assert not any(name.startswith("access-control") for name in response.headers)


def test_with_keys_only_their_bearers_get_in(engine):
    with serving(create_app(engine, ServerConfig(api_key=("sesame", "mellon")))) as url:
        for headers in ({}, {"authorization": "Bearer open"}, {"authorization": "Basic sesame"}):
            response = HTTP.post(url + TEXT, json={"prompt": "a"}, headers=headers)
            assert refusal(response, 401)["code"] == "invalid_api_key"
        refusal(HTTP.get(f"{url}/v1/models"), 401)
        assert HTTP.get(f"{url}/health").status_code == 200
        for key in ("sesame", "mellon"):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
            assert client.completions.create(model="fake-tales", prompt="a").choices[0].text == "a "
    assert len(engine.requests) == 2


def test_without_an_engine_the_api_reports_loading():
    with serving(create_app(None, ServerConfig())) as url:
        health = HTTP.get(f"{url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        response = HTTP.post(url + CHAT, json={"messages": HELLO})
        assert refusal(response, 503)["code"] == "model_loading"
        assert response.headers["retry-after"] == "2"
        refusal(HTTP.get(f"{url}/v1/models"), 503)
        assert HTTP.get(f"{url}/metrics").status_code == 200


def test_a_slow_tokeniser_does_not_hold_up_others(engine, url):
    release, entered = threading.Event(), threading.Event()
    encode = engine.tokenizer.encode

    def slow_encode(text: str, *, add_special_tokens: bool = False) -> list[int]:
        if text == "slow":
            entered.set()
            assert release.wait(30)
        return encode(text)

    engine.tokenizer.encode = slow_encode
    answers = []
    slow = threading.Thread(target=lambda: answers.append(HTTP.post(url + TEXT, json={"prompt": "slow"})))
    slow.start()
    assert entered.wait(30)
    assert HTTP.get(f"{url}/health").status_code == 200
    assert HTTP.post(url + TEXT, json={"prompt": "quick"}).status_code == 200
    release.set()
    slow.join()
    assert answers[0].status_code == 200


def test_load_samples_reach_the_sink(engine: FakeEngine):
    sink = ListSink()
    sample = {"loadtest_id": "t", "finished_s": 1.0, "user": 1, "num_users": 2, "e2e_ms": 3.5, "ok": True}
    with serving(create_app(engine, ServerConfig(), sink)) as url:
        path = f"{url}/internal/load_samples"
        assert HTTP.post(path, json={"samples": [sample, sample]}).json() == {"accepted": 2}
        assert refusal(HTTP.post(path, json={"samples": [{}]}), 400)["param"].startswith("samples[0]")
        json_type = {"content-type": "application/json"}
        refusal(HTTP.post(path, content=b"[" * 100_000, headers=json_type), 400)
        # What a foreign page could send without a preflight does not get in.
        refusal(
            HTTP.post(
                path, content=json.dumps({"samples": [sample]}), headers={"content-type": "text/plain"}
            ),
            404,
        )
    assert [row.e2e_ms for row in sink.rows] == [3.5, 3.5]


def test_load_samples_without_telemetry_are_404(url):
    refusal(HTTP.post(f"{url}/internal/load_samples", json={"samples": []}), 404)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted({field.name for field in TABLE} | {"role", "content", "type", "text", "include_usage"})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "x"]), "content": JSON}
)
BODY = st.dictionaries(st.sampled_from(FIELDS), JSON | st.lists(MESSAGE, max_size=3), max_size=6)
GOOD = st.sampled_from([{}, {"prompt": "a b c", "messages": HELLO}])


@pytest.fixture(scope="module")
def fuzzed_url():
    engine = FakeEngine(max_running=1000)
    with serving(create_app(engine, ServerConfig())) as base:
        yield base
    engine.close()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(path=st.sampled_from([CHAT, TEXT]), good=GOOD, body=BODY)
def test_no_body_makes_the_server_fail(fuzzed_url, path, good, body):
    content = json.dumps(good | body).encode()
    response = HTTP.post(fuzzed_url + path, content=content, headers=JSON_TYPE)
    if response.status_code == 200:
        assert response.text
    else:
        assert response.status_code in (400, 404)
        refusal(response, response.status_code)
