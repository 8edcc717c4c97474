"""What a web page could do to a server on loopback: by another name of it, from another origin, without JSON."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.server.app import create_app

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def bases():
    """Servers by what they were told: on loopback, on every address, with a further name, with a key."""
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


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.openai+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=application/json", 415),
        (None, 415),
    ],
)
def test_a_body_says_that_it_is_json(bases, content_type, status):
    headers = {} if content_type is None else {"content-type": content_type}
    response = HTTP.post(bases["loopback"] + TEXT, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == status
    if status == 415:
        assert response.json()["error"]["code"] == "unsupported_media_type"


def test_a_byte_order_mark_is_read_over(bases):
    content = '\ufeff{"prompt": "a b"}'.encode()
    response = HTTP.post(
        bases["loopback"] + TEXT, content=content, headers={"content-type": "application/json"}
    )
    assert response.json()["choices"][0]["text"] == "a b "
