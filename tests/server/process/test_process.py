"""The life of the server's process: loading, ready, draining, gone; with real signals."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import twofold
from live_server import HTTP
from twofold.api.config import ServerConfig
from twofold.api.errors import ConfigError
from twofold.server.listening import bind

from tests.e2e.waiting import wait_until

HERE = Path(__file__).parents[1]
WAIT_S = 20


class Served:
    """A running serve_fake.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{self.line().split()[1]}"

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended: {self.process.communicate()}"
        return line.strip()

    def stream(self, prompt: str):
        return HTTP.stream("POST", f"{self.url}/v1/completions", json={"prompt": prompt, "stream": True})


@contextlib.contextmanager
def serve_fake(*arguments: str) -> Iterator[Served]:
    # The path of the tested package, wherever it was imported from.
    path = os.pathsep.join([str(Path(twofold.__file__).parents[1]), str(HERE)])
    process = subprocess.Popen(
        [sys.executable, str(HERE / "serve_fake.py"), *arguments],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Served(process)
    finally:
        process.kill()
        process.communicate()


def read_until(lines: Iterator[str], word: str) -> list[str]:
    """The lines up to one with `word`, which must come."""
    seen = []
    for line in lines:
        seen.append(line)
        if word in line:
            return seen
    raise AssertionError(f"no {word!r} in {seen}")


def test_sigterm_lets_a_running_answer_finish_and_refuses_new_ones():
    with serve_fake("60", "hold") as served:
        assert served.line() == "ready"
        with served.stream("a b c") as response:
            lines = response.iter_lines()
            read_until(lines, '"a "')
            served.process.send_signal(signal.SIGTERM)
            assert served.line() == "draining 1"
            health = HTTP.get(f"{served.url}/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            refused = HTTP.post(f"{served.url}/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_draining"
            assert "retry-after" in refused.headers
            served.process.send_signal(signal.SIGUSR1)
            read_until(lines, '"c "')
            read_until(lines, "[DONE]")
        assert served.process.wait(WAIT_S) == 0
        (logged,) = served.process.stderr.read().splitlines()
        assert logged.startswith("503 POST /v1/completions ")
        assert "the server is shutting down" in logged


def test_an_answer_that_outlasts_the_drain_gets_an_error_event():
    with serve_fake("0.1", "hold") as served:
        assert served.line() == "ready"
        with served.stream("a b c") as response:
            lines = response.iter_lines()
            read_until(lines, '"a "')
            served.process.send_signal(signal.SIGTERM)
            assert "server_draining" in read_until(lines, '"error"')[-1]
            read_until(lines, "[DONE]")
        assert served.process.wait(WAIT_S) == 0


def test_a_broken_stdout_does_not_keep_the_server_from_ending():
    """Closed standard output, as in `serve … | head -1`."""
    with serve_fake("60", "hold") as served:
        assert served.line() == "ready"
        with served.stream("a b c") as response:
            lines = response.iter_lines()
            read_until(lines, '"a "')
            served.process.stdout.close()
            served.process.send_signal(signal.SIGTERM)
            # It has begun to drain when it says so.
            wait_until(lambda: HTTP.get(f"{served.url}/health").json()["status"] == "draining")
            served.process.send_signal(signal.SIGUSR1)
            read_until(lines, "[DONE]")
        assert served.process.wait(WAIT_S) == 0
        assert served.process.stderr.read().count("\n") == 1  # a warning in the log


def test_a_full_stdout_pipe_does_not_block_either():
    with serve_fake("60", "blocked-stdout") as served:
        assert served.line() == "ready"
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(WAIT_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_with_code_0(number):
    with serve_fake("60") as served:
        assert served.line() == "ready"
        assert HTTP.post(f"{served.url}/v1/completions", json={"prompt": "a b"}).status_code == 200
        served.process.send_signal(number)
        # The answer that is complete is not among the running ones.
        assert served.line() == "draining 0"
        assert served.process.wait(WAIT_S) == 0


def test_the_second_signal_ends_at_once():
    with serve_fake("60", "hold") as served:
        assert served.line() == "ready"
        with contextlib.suppress(httpx.TransportError), served.stream("a b c") as response:
            # Kept: dropping the iterator would close the connection.
            lines = response.iter_lines()
            read_until(lines, '"a "')
            served.process.send_signal(signal.SIGTERM)
            assert served.line() == "draining 1"
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(WAIT_S) == 128 + signal.SIGTERM


def test_while_the_model_loads_health_is_503_and_a_signal_ends_it():
    with serve_fake("60", "load-forever") as served:
        health = HTTP.get(f"{served.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(WAIT_S) == 0


def test_a_model_that_cannot_be_loaded_ends_the_server():
    with serve_fake("60", "load-fails") as served:
        assert served.process.wait(WAIT_S) == 2
        assert served.process.stderr.read() == "model.safetensors is damaged\n"


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} is in use .*--port"):
            bind(ServerConfig(port=port))


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7"])
def test_a_foreign_host_is_named(host):
    with pytest.raises(ConfigError, match=f"no address {host}"):
        bind(ServerConfig(host=host))
