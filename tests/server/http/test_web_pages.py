"""Web pages at a server on loopback: by another name of it, from another origin, with a body not declared as JSON."""

from __future__ import annotations

import json

import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.server.app import create_app

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def bases():
    """Servers by their configuration: on loopback, on every address, with a further name, with a key."""
    engine = FakeEngine()
    configs = {
        "loopback": ServerConfig(),
        "everywhere": ServerConfig(host="0.0.0.0"),
        "named": ServerConfig(host="0.0.0.0", allowed_hosts=("tales.lan",)),
        "key": ServerConfig(api_key=("sesame",)),
    }
    with (
        serving(create_app(engine, configs["loopback"])) as loopback,
        serving(create_app(engine, configs["everywhere"])) as everywhere,
        serving(create_app(engine, configs["named"])) as named,
        serving(create_app(engine, configs["key"])) as key,
    ):
        yield {"loopback": loopback, "everywhere": everywhere, "named": named, "key": key}
    engine.close()


@pytest.mark.parametrize(
    ("server", "host", "origin", "refused_for"),
    [
        ("loopback", "localhost:10002", None, None),
        ("loopback", "127.0.0.1", None, None),
        ("loopback", "[::1]:10002", None, None),
        ("loopback", "evil.example:10002", None, "Host"),
        ("loopback", "localhost.evil.example", None, "Host"),
        ("loopback", "192.168.1.7", None, "Host"),
        ("loopback", "localhost:1@evil.example", None, "Host"),
        ("loopback", "localhost", "http://localhost:1@evil.example", "Origin"),
        ("loopback", "localhost", "http://localhost:3000", None),
        ("loopback", "localhost", "http://127.0.0.1:8501", None),
        ("loopback", "localhost", "https://evil.example", "Origin"),
        ("loopback", "localhost", "http://localhost.evil.example", "Origin"),
        ("loopback", "localhost", "null", "Origin"),
        ("everywhere", "192.168.1.7:10002", None, None),
        ("everywhere", "192.168.1.7:10002", "http://192.168.1.7:10002", None),
        ("everywhere", "192.168.1.7:10002", "http://192.168.1.8:10002", "Origin"),
        ("everywhere", "tales.lan", None, "Host"),
        ("named", "tales.lan:10002", "http://tales.lan:10002", None),
        ("named", "evil.example", None, "Host"),
        ("key", "evil.example", "https://evil.example", None),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_only_local_names_and_origins_reach_a_server_without_a_key(
    bases, server, host, origin, refused_for, path
):
    headers = {"host": host, "authorization": "Bearer sesame"} | ({"origin": origin} if origin else {})
    response = HTTP.get(bases[server] + path, headers=headers)
    assert response.status_code == (200 if refused_for is None else 403), response.text
    if refused_for:
        assert f"the {refused_for} header is" in response.json()["error"]["message"]


def test_a_key_does_not_open_the_load_testers_path_to_another_name(bases):
    response = HTTP.post(
        bases["key"] + "/internal/load_samples", json={"samples": []}, headers={"host": "evil.example"}
    )
    assert response.status_code == 403


JSON_TYPES = (
    "application/json",
    "application/json; charset=utf-8",
    "Application/JSON",
    "application/vnd.openai+json",
)
OTHER_TYPES = (
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=application/json",
    None,
)
POSTS = {
    TEXT: {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {"model": "fake-tales", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]},
    "/v1/messages/count_tokens": {"model": "fake-tales", "messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": []},
    "/api/chat": {"model": "fake-tales", "messages": [{"role": "user", "content": "a"}]},
    "/api/generate": {"model": "fake-tales", "prompt": "a"},
    "/api/show": {"model": "fake-tales"},
    "/api/pull": {"model": "fake-tales"},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/api/embed": {"model": "fake-tales", "input": "a"},
    "/api/embeddings": {"model": "fake-tales", "prompt": "a"},
}


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("content_type", [*JSON_TYPES, *OTHER_TYPES])
def test_a_program_needs_no_content_type(bases, path, content_type):
    """`curl -d` declares a form, some clients nothing."""
    headers = {} if content_type is None else {"content-type": content_type}
    response = HTTP.post(bases["loopback"] + path, content=json.dumps(POSTS[path]).encode(), headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("reported", [{"origin": "http://localhost:3000"}, {"sec-fetch-site": "cross-site"}])
@pytest.mark.parametrize("content_type", [*JSON_TYPES[:1], *OTHER_TYPES])
def test_a_browser_declares_json(bases, path, reported, content_type):
    """A page may send every other type to another site without asking it first."""
    headers = reported | ({} if content_type is None else {"content-type": content_type})
    response = HTTP.post(bases["loopback"] + path, content=json.dumps(POSTS[path]).encode(), headers=headers)
    assert response.status_code == (200 if content_type in JSON_TYPES else 415), response.text
    if response.status_code == 415:
        assert "application/json" in response.text


def test_a_format_that_is_no_json_is_refused(bases):
    response = HTTP.post(bases["loopback"] + TEXT, data={"prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


def test_a_byte_order_mark_is_read_over(bases):
    content = '\ufeff{"prompt": "a b"}'.encode()
    response = HTTP.post(
        bases["loopback"] + TEXT, content=content, headers={"content-type": "application/json"}
    )
    assert response.json()["choices"][0]["text"] == "a b "
