"""A full server's refusal is the same whether it came from the listening layer or from the application."""

from __future__ import annotations

import re
import socket
import time

import pytest
from live_server import connect, serving
from twofold.api.config import ServerConfig
from twofold.server.app import create_app
from twofold.server.http.early_refusals import COMPUTING_PATHS, EarlyRefusals, WholeRequest, whole_request

HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\nContent-Length: 2\r\n"


def request(path: str, fields: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\n" % path.encode() + HOST + fields + JSON + b"\r\n{}"


def answer(connection: socket.socket) -> bytes:
    """One whole answer, without what differs from one to the next or in the order of headers."""
    received = b""
    while (found := re.search(rb"(?i)content-length: (\d+)\r\n(?s:.*?)\r\n\r\n", received)) is None or len(
        received
    ) < found.end() + int(found[1]):
        piece = connection.recv(4096)
        assert piece, received
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    status, *fields = head.lower().split(b"\r\n")
    kept = [field for field in fields if not field.startswith((b"date:", b"x-request-id: "))]
    assert len(kept) == len(fields) - 2
    return b"\r\n".join([status, *sorted(kept), b"", body])


@pytest.fixture
def refused(monkeypatch) -> list[str]:
    """The paths of requests that the listening layer has refused."""
    paths: list[str] = []
    real = EarlyRefusals.answer

    def recorded(self: EarlyRefusals, request: WholeRequest) -> bytes | None:
        answered = real(self, request)
        paths.extend([request.path] if answered else [])
        return answered

    monkeypatch.setattr(EarlyRefusals, "answer", recorded)
    return paths


@pytest.mark.parametrize("key", [None, "sesame"])
def test_in_one_piece_or_in_two_the_refusal_is_the_same(engine, refused, key):
    engine.is_full = True
    close = b"Connection: close\r\n"
    asked = [(path, close) for path in COMPUTING_PATHS]
    asked += [("/v1/responses", b""), ("/v1/messages", b"Origin: http://evil.example\r\n")]
    with serving(create_app(engine, ServerConfig(api_key=(key,) if key else ()))) as url:
        for path, fields in asked:
            whole = request(path, fields)
            with connect(url) as connection:
                connection.sendall(whole)
                early = answer(connection)
                assert refused.pop() == path
                if fields == close:
                    assert connection.recv(1) == b""
            with connect(url) as connection:
                connection.sendall(whole[:20])
                time.sleep(0.03)  # for the server to read it
                connection.sendall(whole[20:])
                assert answer(connection) == early
            assert not refused


def test_a_refused_connection_goes_on(engine, refused):
    app = create_app(engine, ServerConfig())
    with serving(app) as url, connect(url) as connection:
        engine.is_full = True
        for _ in range(3):
            connection.sendall(request("/v1/completions"))
            assert answer(connection).startswith(b"http/1.1 429 ")
        engine.is_full = False
        connection.sendall(request("/v1/completions"))
        assert answer(connection).startswith(b"http/1.1 400 ")
        engine.is_full = True
        connection.sendall(request("/api/chat", b"Connection: close\r\n"))
        assert answer(connection).startswith(b"http/1.1 429 ")
        assert connection.recv(1) == b""
    assert len(refused) == 4
    assert app._state.metrics.refused == {"429": 4, "400": 1}


@pytest.mark.parametrize(
    ("data", "is_whole"),
    [
        (request("/v1/completions"), True),
        (request("/v1/completions", b"X-Odd: \t a:b \xff\r\n"), True),
        (request("/v1/completions", b"Connection: Close\r\n"), True),
        (request("/v1/completions", b"Connection: upgrade\r\n"), False),
        (request("/v1/completions?beta=true"), False),
        (request("/v1/models"), False),
        (request("/v1/completions").replace(b"POST", b"GET"), False),
        (request("/v1/completions").replace(b"1.1", b"1.0"), False),
        (request("/v1/completions").replace(HOST, b""), False),
        (request("/v1/completions") + b"P", False),
        (request("/v1/completions")[:-1], False),
        (request("/v1/completions")[:-4], False),
        (request("/v1/completions", b"Content-Length: 2\r\n"), False),
        (request("/v1/completions", b"Transfer-Encoding: chunked\r\n"), False),
        (request("/v1/completions", b"Expect: 100-continue\r\n"), False),
        (request("/v1/completions", b" folded: 1\r\n"), False),
        (request("/v1/completions", b"Spaced : 1\r\n"), False),
        (request("/v1/completions", b"X: a\nb\r\n"), False),
        (request("/v1/completions", b"X: \0\r\n"), False),
        (b"", False),
    ],
)
def test_what_is_unusual_is_left_to_h11(data, is_whole):
    found = whole_request(data)
    assert (found is not None) == is_whole
    assert found is None or found.closes == (b"Close" in data)
