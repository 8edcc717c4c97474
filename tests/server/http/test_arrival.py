"""When a request arrived and what each part of its way to the engine took, over real sockets."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable

import httpx
import openai
import pytest
from twofold.api.request_times import PARTS, RequestTimes
from twofold.server.http import arrival, connections
from twofold.server.http.arrival import kernel_wait_s

from tests.server.fake_engine import FakeEngine
from tests.server.live_server import HTTP, connect, receive_until

BODY = json.dumps({"prompt": "a b c"}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY)
)


def times_of(engine: FakeEngine, index: int = -1) -> RequestTimes:
    times = engine.requests[index].times
    assert times is not None
    return times


def metric(url: str, name: str) -> float:
    lines = HTTP.get(f"{url}/metrics").text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.fixture
def no_kernel_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "kernel_wait_s", lambda connection: 0.0)


class FakeSocket:
    """A socket whose TCP_INFO says that data came `waited_ms` ago."""

    def __init__(self, waited_ms: int, size: int = 104) -> None:
        self._info = struct.pack("=52xI", waited_ms).ljust(104, b"\xff")[:size]

    def getsockopt(self, level: int, name: int, size: int) -> bytes:
        return self._info[:size]


@pytest.mark.parametrize(
    ("connection", "expected"),
    [
        (FakeSocket(0), 0.0),
        (FakeSocket(250), 0.25),
        (FakeSocket(250, size=40), 0.0),  # an older struct
        (None, 0.0),
    ],
)
def test_wait_in_the_kernel(connection: object, expected: float) -> None:
    assert kernel_wait_s(connection) == expected


def test_wait_in_the_kernel_of_a_real_socket() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert kernel_wait_s(ours) == 0.0  # not TCP
    begun_s = time.perf_counter()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"
            # The kernel's clock ticks at least every 10 ms.
            assert 0.0 <= kernel_wait_s(accepted) <= time.perf_counter() - begun_s + 0.01


def test_ttft_and_e2e_begin_at_the_first_byte(
    url: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that the first bytes waited for the event loop is part of them."""
    monkeypatch.setattr(connections, "kernel_wait_s", lambda connection: 1000.0)
    HTTP.post(f"{url}/v1/completions", content=BODY).raise_for_status()
    assert 1000 <= metric(url, "vllm:time_to_first_token_seconds_sum") < 1060
    assert 1000 <= metric(url, "vllm:e2e_request_latency_seconds_sum") < 1060
    assert (
        1000 <= metric(url, 'twofold:request_stage_seconds_sum{model_name="fake-tales",stage="read"}') < 1060
    )
    assert times_of(engine).received_s < time.time() - 999


def test_the_parts_have_no_gaps(url: str, engine: FakeEngine) -> None:
    HTTP.post(f"{url}/v1/completions", content=BODY).raise_for_status()
    times = times_of(engine)
    assert tuple(times.parts) == PARTS
    assert sum(times.parts.values()) == pytest.approx(times.submitted - times.received, abs=1e-9)


def test_a_body_that_comes_late_is_reading(url: str, engine: FakeEngine, no_kernel_wait: None) -> None:
    with connect(url) as connection:
        connection.sendall(HEAD)
        # The server reads in order of arrival: once it has answered this, it has the head.
        HTTP.get(f"{url}/metrics")
        head_read = time.perf_counter()
        HTTP.get(f"{url}/metrics")
        late_s = time.perf_counter() - head_read
        connection.sendall(BODY)
        receive_until(connection, b'"usage"')
    assert times_of(engine).parts["read"] >= late_s > 0


def test_a_kept_alive_connection_starts_again(url: str, engine: FakeEngine, no_kernel_wait: None) -> None:
    with httpx.Client() as client:
        client.post(f"{url}/v1/completions", content=BODY).raise_for_status()
        between = time.perf_counter()
        client.post(f"{url}/v1/completions", content=BODY).raise_for_status()
    assert times_of(engine, 0).submitted < between < times_of(engine, 1).received


@pytest.mark.parametrize("split", [0, 30, len(HEAD), len(HEAD) + 5, len(HEAD + BODY) + 7])
def test_pipelined_requests(url: str, engine: FakeEngine, split: int) -> None:
    """Two requests in one stream of bytes, cut anywhere: each has its own times."""
    both = (HEAD + BODY) * 2
    with connect(url) as connection:
        for part in (both[:split], both[split:]):
            connection.sendall(part)
        received = receive_until(connection, b'"usage"')
        while received.count(b'"usage"') < 2:
            received += connection.recv(4096)
    first, second = times_of(engine, 0), times_of(engine, 1)
    assert first is not second
    assert first.received <= first.submitted <= second.submitted


def chat(client: openai.OpenAI) -> None:
    client.chat.completions.create(model="fake-tales", messages=[{"role": "user", "content": "a b"}])


def completion(client: openai.OpenAI) -> None:
    client.completions.create(model="fake-tales", prompt="a b")


def large(client: openai.OpenAI) -> None:
    client.completions.create(model="fake-tales", prompt="a b", user="x" * 17_000)


def constrained(client: openai.OpenAI) -> None:
    client.completions.create(model="fake-tales", prompt="a b", extra_body={"guided_regex": "a*"})


@pytest.mark.parametrize(
    ("ask", "extra"),
    [(chat, {"template"}), (completion, set()), (large, {"parse_wait"}), (constrained, {"compile"})],
)
def test_parts_that_only_some_requests_have(
    client: openai.OpenAI, engine: FakeEngine, ask: Callable[[openai.OpenAI], None], extra: set[str]
) -> None:
    ask(client)
    parts = times_of(engine).parts
    assert {part for part, seconds in parts.items() if seconds > 0} == {
        "read",
        "parse",
        "tokenise_wait",
        "tokenise",
        *extra,
    }


def test_another_server_without_stamps_starts_at_the_request() -> None:
    scope: dict[str, object] = {}
    times = arrival.times_of(scope)
    assert arrival.times_of(scope) is times
    assert times.submitted == times.received
