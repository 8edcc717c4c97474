"""A client that hangs up frees its place in the engine, at once and whatever it was waiting for."""

from __future__ import annotations

import json
import socket

import pytest
from fake_engine import FakeEngine
from live_server import HTTP, receive_until, serving
from twofold.api.config import ServerConfig
from twofold.server.app import create_app

WAIT_S = 20


@pytest.fixture
def held_engine():
    """Every answer stands still after its first word; two places."""
    engine = FakeEngine(max_running=2)
    engine.hold.clear()
    yield engine
    engine.hold.set()
    engine.close()


@pytest.fixture
def address(held_engine):
    with serving(create_app(held_engine, ServerConfig())) as base:
        host, port = base.removeprefix("http://").split(":")
        yield host, int(port)


def post(address: tuple[str, int], body: dict) -> socket.socket:
    """A connection on which a request has been sent and nothing read."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(address, timeout=WAIT_S)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def test_hanging_up_in_a_stream_frees_the_place(held_engine, address):
    connection = post(address, {"prompt": "a b c", "stream": True})
    receive_until(connection, b'"a "')
    assert held_engine.stats().num_running == 1
    connection.close()
    assert held_engine.idle.wait(WAIT_S)
    assert held_engine.cancelled == [held_engine.requests[0].request_id]


def test_hanging_up_before_a_whole_answer_frees_the_place(held_engine, address):
    connection = post(address, {"prompt": "a b c"})
    assert held_engine.started.wait(WAIT_S)
    connection.close()
    assert held_engine.idle.wait(WAIT_S)
    assert held_engine.cancelled == [held_engine.requests[0].request_id]


def test_a_freed_place_is_used_again(held_engine, address):
    url = f"http://{address[0]}:{address[1]}/v1/completions"
    first, second = (post(address, {"prompt": "a b c", "stream": True}) for _ in range(2))
    for connection in (first, second):
        assert connection.recv(64)
    assert HTTP.post(url, json={"prompt": "a b"}).status_code == 429
    first.close()
    second.close()
    assert held_engine.idle.wait(WAIT_S)
    held_engine.hold.set()
    assert HTTP.post(url, json={"prompt": "a b"}).json()["choices"][0]["text"] == "a b "


def test_a_client_that_stops_sending_counts_as_gone(held_engine, address):
    connection = post(address, {"prompt": "a b c"})
    assert held_engine.started.wait(WAIT_S)
    connection.shutdown(socket.SHUT_WR)
    assert held_engine.idle.wait(WAIT_S)
    assert held_engine.cancelled == [held_engine.requests[0].request_id]


def test_a_request_cut_in_its_middle_is_not_waited_for(address):
    connection = socket.create_connection(address, timeout=WAIT_S)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b'Content-Length: 100\r\n\r\n{"prompt"'
    )
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(4096) == b""


def test_a_complete_answer_is_not_cancelled(held_engine, address):
    held_engine.hold.set()
    url = f"http://{address[0]}:{address[1]}/v1/completions"
    assert HTTP.post(url, json={"prompt": "a b"}).status_code == 200
    assert HTTP.post(url, json={"prompt": "a b", "stream": True}).status_code == 200
    assert held_engine.cancelled == []
