"""HTTPS with a certificate of one's own, and web pages of other origins that may call the server."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.api.errors import ConfigError
from twofold.server.app import create_app
from twofold.server.listening import certificate_of

TLS = Path(__file__).parent / "tls"
FILES = {"ssl_certfile": str(TLS / "certificate.pem"), "ssl_keyfile": str(TLS / "key.pem")}
"""Self-signed for localhost and 127.0.0.1, valid for a hundred years; used by these tests only."""
PAGE = "https://chat.example"


def test_a_stream_arrives_over_https(engine: FakeEngine) -> None:
    context = certificate_of(ServerConfig(**FILES))
    trusted = ssl.create_default_context(cafile=FILES["ssl_certfile"])
    with serving(create_app(engine, ServerConfig()), certificate=context) as url:
        assert url.startswith("https://")
        with httpx.Client(verify=trusted, trust_env=False, timeout=20) as client:
            body = {"prompt": "Once", "max_tokens": 8, "stream": True}
            with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        with pytest.raises(httpx.TransportError):
            HTTP.get(url.replace("https", "http"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ssl_certfile": FILES["ssl_certfile"]}, "--ssl-certfile was given alone"),
        ({"ssl_keyfile": FILES["ssl_keyfile"]}, "--ssl-keyfile was given alone"),
        ({**FILES, "ssl_keyfile": "/no/such/key.pem"}, "No such file"),
        ({**FILES, "ssl_certfile": FILES["ssl_keyfile"]}, "cannot use --ssl-certfile"),
    ],
)
def test_files_that_make_no_certificate_are_named(files: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        certificate_of(ServerConfig(**files))


@pytest.mark.parametrize("key", [(), ("sesame",)])
def test_pages_of_an_allowed_origin_may_call(engine: FakeEngine, key: tuple[str, ...]) -> None:
    config = ServerConfig(allowed_origins=(PAGE,), api_key=key)
    with serving(create_app(engine, config)) as url:
        requested = {"origin": PAGE, "access-control-request-method": "POST"}
        requested |= {"access-control-request-headers": "authorization,content-type"}
        preflight = HTTP.options(f"{url}/v1/chat/completions", headers=requested)
        answer = HTTP.get(f"{url}/v1/models", headers={"origin": PAGE})
        other = HTTP.get(f"{url}/v1/models", headers={"origin": "https://evil.example"})
    assert preflight.status_code == 200
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert answer.status_code == (401 if key else 200)
    assert answer.headers["access-control-allow-origin"] == PAGE, "a refusal is readable, too"
    assert other.status_code == (401 if key else 403)
    assert "access-control-allow-origin" not in other.headers


def test_any_origin_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="without --api-key"):
        ServerConfig(allowed_origins=("*",))
