"""Connections as such: no delay between small packets, an end to every wait, a bound, and too few descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
import threading
import time

import httpx
import pytest
from live_server import HTTP, connect, serving
from twofold.api.config import ServerConfig
from twofold.api.errors import ConfigError
from twofold.server.app import create_app
from twofold.server.http import connections
from twofold.server.http.connections import ConnectionLimits
from twofold.server.listening import HttpServer, connection_bound

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def everything(connection: socket.socket) -> bytes:
    """All bytes received until the server closes."""
    with contextlib.suppress(ConnectionResetError):
        return b"".join(iter(lambda: connection.recv(4096), b""))
    return b""


def test_accepted_connections_send_small_packets_at_once(engine, monkeypatch):
    seen = []
    made = connections.Connection.connection_made

    def connection_made(self, transport):
        made(self, transport)
        accepted = transport.get_extra_info("socket")
        seen.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(connections.Connection, "connection_made", connection_made)
    with serving(create_app(engine, ServerConfig())) as url:
        HTTP.get(f"{url}/health")
    assert seen
    assert all(seen)


@pytest.mark.slow  # by the clock; the test above says the same by the option
@pytest.mark.slow  # it measures times
def test_answers_over_a_kept_alive_connection_do_not_wait_for_an_acknowledgement(url):
    """40 ms each, the kernel's delayed acknowledgement, when Nagle's algorithm is on."""
    times = []
    with httpx.Client(trust_env=False) as client:
        for _ in range(20):
            begun = time.perf_counter()
            client.get(f"{url}/health")
            times.append(time.perf_counter() - begun)
    # The fifth quickest: a busy machine adds to some, Nagle to all but the first.
    assert sorted(times)[4] < 0.02


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET /health HTTP/1.1\r\nHo", b"408"),
        (HEALTH + b"GET /hea", b"408"),
        # The second request never comes, and what an answer did not need of a body neither.
        (HEALTH, b"200"),
        (b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{", b"404"),
    ],
)
def test_a_connection_that_asks_nothing_is_closed(engine, sent, answer):
    limits = ConnectionLimits(head_timeout_s=0.2, keep_alive_s=0.2)
    with serving(create_app(engine, ServerConfig()), limits) as url, connect(url) as connection:
        connection.sendall(sent)
        received = everything(connection)
    assert (answer in received) if answer else received == b""


def test_a_head_that_drips_is_closed_too(engine):
    with (
        serving(create_app(engine, ServerConfig()), ConnectionLimits(head_timeout_s=0.5)) as url,
        connect(url) as connection,
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        connection.settimeout(0.1)
        received = b""
        for _ in range(200):
            with contextlib.suppress(TimeoutError, ConnectionError):
                connection.sendall(b"X-A: b\r\n")
                received = connection.recv(4096)
                break
        assert b"408" in received


def test_a_client_that_does_not_read_its_answer_is_cut_off(engine, monkeypatch):
    made, lost = connections.Connection.connection_made, connections.Connection.connection_lost
    is_cut = threading.Event()

    def connection_made(self, transport):
        made(self, transport)
        # Some kernels would take the whole answer.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)

    def connection_lost(self, error):
        lost(self, error)
        is_cut.set()

    monkeypatch.setattr(connections.Connection, "connection_made", connection_made)
    monkeypatch.setattr(connections.Connection, "connection_lost", connection_lost)
    limits = ConnectionLimits(write_timeout_s=0.3)
    with serving(create_app(engine, ServerConfig()), limits) as url, connect(url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"prompt": ("w" * 140_000 + " ") * 50}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(64)
        assert is_cut.wait(60)
        with pytest.raises(ConnectionResetError):
            any(not connection.recv(64 * 1024) for _ in range(10_000))


def test_at_the_bound_the_longest_idle_connection_is_closed(engine):
    with (
        serving(create_app(engine, ServerConfig()), ConnectionLimits(max_connections=4)) as url,
        contextlib.ExitStack() as opened,
    ):
        idle = [opened.enter_context(connect(url)) for _ in range(12)]
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        assert [everything(connection) for connection in idle[:8]] == [b""] * 8


def test_beyond_a_bound_of_answering_connections_new_ones_get_503(engine):
    engine.hold.clear()
    with (
        serving(create_app(engine, ServerConfig()), ConnectionLimits(max_connections=2)) as url,
        contextlib.ExitStack() as opened,
    ):
        body = b'{"prompt": "a b", "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for _ in range(2):
            connection = opened.enter_context(connect(url))
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert connection.recv(64)
        response = httpx.get(f"{url}/health", trust_env=False)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "too_many_connections"
        assert "retry-after" in response.headers
        engine.hold.set()


def test_without_descriptors_the_server_logs_once_a_second_and_continues(engine, caplog):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        caplog.at_level(logging.WARNING),
        serving(create_app(engine, ServerConfig())) as url,
        contextlib.ExitStack() as opened,
    ):
        HTTP.get(f"{url}/health")
        waiting = [opened.enter_context(socket.socket()) for _ in range(40)]
        host, port = url.removeprefix("http://").split(":")
        with open("/dev/null") as probe:
            lowest_free = probe.fileno()
        try:
            # Both ends are this process's: ten more of them can be accepted, the others wait in the backlog.
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 10, before[1]))
            begun = time.monotonic()
            for connection in waiting:
                connection.connect((host, int(port)))
            waiting[-1].settimeout(20)
            waiting[-1].sendall(HEALTH)
            assert b"200 OK" in waiting[-1].recv(64)
            lasted_s = time.monotonic() - begun
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    reported = [record for record in caplog.records if "cannot accept a connection" in record.message]
    assert 1 <= len(reported) <= 1 + lasted_s
    assert "Too many open files; raise the limit" in reported[0].message
    assert len(caplog.records) == len(reported)


def test_a_server_without_descriptors_ends_without_output(engine, caplog):
    """asyncio tries a second later to accept again, on a listener that is closed by then."""
    server = HttpServer(create_app(engine, ServerConfig()), ConnectionLimits())
    failed = {"message": "Exception in callback _start_serving()", "exception": ValueError("descriptor -1")}
    loop = asyncio.new_event_loop()
    with caplog.at_level(logging.ERROR):
        server._handle_loop_error(loop, failed)
        assert len(caplog.records) == 1
        server.should_exit = True
        server._handle_loop_error(loop, failed)
    loop.close()
    assert len(caplog.records) == 1


def test_the_bound_follows_the_limit_of_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
        assert connection_bound(ServerConfig()) == 896
        assert connection_bound(ServerConfig(max_connections=7)) == 7
        with pytest.raises(
            ConfigError, match=r"--max-connections was given 1000; .* 1024 open files leaves 896"
        ):
            connection_bound(ServerConfig(max_connections=1000))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_body_in_tiny_chunks_does_not_hold_the_others_up(url):
    """h11 parses 64 KiB of them in one go for 0.1 s; only pieces of 4 KiB are given to it."""
    largest = []
    data_received = connections.Connection.data_received

    def counted(self, data):
        largest.append(len(data))
        data_received(self, data)

    with pytest.MonkeyPatch.context() as patch, connect(url) as connection:
        patch.setattr(connections.Connection, "data_received", counted)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        body = b'{"prompt": "a b"}' + b" " * 20_000
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        connection.sendall(head + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks)
        assert b"200 OK" in everything(connection)
    assert max(largest) == 4096
