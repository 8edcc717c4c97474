"""`make run` from its first line to Ctrl-C: the server answers, the dashboard is up, the database holds the
decisions of exactly that request, and nothing is left running."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import run_stack
from tests.e2e.ports import free_port, is_listening
from tests.e2e.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0


class Stack:
    """A running `python -m scripts.run_stack`, its ports and what it printed."""

    def __init__(self, database: Path) -> None:
        self.port, self.dashboard_port = free_port(), free_port()
        self.database = database
        self.output: list[str] = []
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TWOFOLD_")}
        environment["TWOFOLD_TELEMETRY_URL"] = f"sqlite:///{database}"
        if "PYTHONPATH" not in environment:
            environment["PYTHONPATH"] = str(ROOT / "engine")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "scripts.run_stack",
                "--port",
                str(self.port),
                "--dashboard-port",
                str(self.dashboard_port),
                "--accelerator",
                "emulated:rtx4090-pcie4",
                "--ratio",
                "0.25",
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.is_up = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if "Ctrl-C ends both" in line:
                self.is_up.set()
        self.is_up.set()

    def wait_until_up(self) -> None:
        assert self.is_up.wait(START_TIMEOUT_S), "".join(self.output)
        assert self.process.poll() is None, "".join(self.output)

    def children(self) -> list[int]:
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text(encoding="ascii")
        return [int(pid) for pid in text.split()]

    def get(self, port: int, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def chat(self, question: str, max_tokens: int) -> tuple[http.client.HTTPMessage, list[dict[str, object]]]:
        """A streamed chat completion: headers and the decoded `data:` events before [DONE]."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = {
            "model": "twofold-tales",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": max_tokens,
            "messages": [{"role": "user", "content": question}],
        }
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        lines = answer.read().decode().splitlines()
        assert answer.status == 200, lines
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return answer.headers, [json.loads(event) for event in events[:-1]]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.reader.join(timeout=10)
        return code


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    running = Stack(tmp_path / "twofold.db")
    yield running
    if running.process.poll() is None:
        running.stop()


def test_a_streamed_answer_its_traces_and_a_clean_end(stack: Stack) -> None:
    stack.wait_until_up()
    headers, events = stack.chat("Tell me the story of a clever fox.", max_tokens=12)
    choices = [choice for event in events for choice in event["choices"]]  # type: ignore[attr-defined]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    usage = next(event["usage"] for event in events if event.get("usage"))
    assert len(text) > 10
    assert usage["completion_tokens"] <= 12  # type: ignore[index]
    assert headers["x-twofold-accelerator"] == "emulated:rtx4090-pcie4"
    assert headers["x-twofold-clock"] == "virtual"
    assert stack.get(stack.dashboard_port, "/_stcore/health")[0] == 200
    assert "emulated:rtx4090-pcie4" in stack.get(stack.port, "/health")[1]

    children = stack.children()
    assert len(children) == 2
    assert stack.stop() == 0, "".join(stack.output)
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert not is_listening(stack.port)
    assert not is_listening(stack.dashboard_port)

    with sqlite3.connect(f"file:{stack.database}?mode=ro", uri=True) as database:
        (request,) = database.execute(
            "SELECT number, prompt_tokens, completion_tokens FROM request"
        ).fetchall()
        assert request[1:] == (usage["prompt_tokens"], usage["completion_tokens"])  # type: ignore[index]
        (num_layers, emulated) = database.execute("SELECT num_layers, emulated FROM run").fetchone()
        tokens = database.execute(
            "SELECT COUNT(DISTINCT position) FROM token_layer WHERE request = ?", request[:1]
        ).fetchone()
        rows = database.execute("SELECT COUNT(*) FROM token_layer WHERE request = ?", request[:1]).fetchone()
        uploads = database.execute("SELECT COUNT(*) FROM upload").fetchone()
        cache_events = database.execute("SELECT COUNT(*) FROM cache_event").fetchone()
    assert emulated == 1
    assert tokens[0] == request[1] + request[2] - 1  # the last token is sampled, never computed
    assert rows[0] == tokens[0] * num_layers
    assert uploads[0] > 0
    assert cache_events[0] > 0


@pytest.mark.slow
def test_when_one_process_ends_the_other_is_ended_with_its_exit_code(stack: Stack) -> None:
    stack.wait_until_up()
    server, dashboard = stack.children()
    os.kill(dashboard, signal.SIGKILL)
    assert stack.process.wait(timeout=60) == 1
    stack.reader.join(timeout=10)
    assert "the dashboard was ended by signal 9" in "".join(stack.output)
    assert not Path(f"/proc/{server}").exists()


def test_a_port_in_use_is_named_before_anything_starts() -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "scripts.run_stack", "--port", str(port)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"port {port} is in use; choose another: make run PORT=")


@pytest.mark.parametrize("name", ["port", "dashboard-port"])
@pytest.mark.parametrize("given", ["99999", "0", "-1", "abc", ""])
def test_a_port_that_is_none_ends_in_one_line(
    name: str, given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = "dashboard-port" if name == "port" else "port"
    monkeypatch.setattr("sys.argv", ["run_stack.py", f"--{name}={given}", f"--{free}={free_port()}"])
    assert run_stack.main() == 2
    setting = name.upper().replace("-", "_")
    assert capsys.readouterr().err == f"{setting} was given {given!r}; expected a port from 1 to 65535\n"


def test_a_model_that_is_not_there_gives_one_line_and_no_half_started_server(tmp_path: Path) -> None:
    ports = [str(free_port()), str(free_port())]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "scripts.run_stack",
            "--port",
            ports[0],
            "--dashboard-port",
            ports[1],
            "--accelerator",
            "none",
            "--model",
            str(tmp_path / "nowhere"),
        ],
        cwd=ROOT,
        env=dict(
            os.environ, TWOFOLD_TELEMETRY_URL=f"sqlite:///{tmp_path}/x.db", PYTHONPATH=str(ROOT / "engine")
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
    assert not is_listening(int(ports[0]))


def test_a_group_is_ended_while_its_leader_still_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that was reaped may share its number with a stranger's group."""
    ended, killpg = [], os.killpg

    def watched(group: int, number: int) -> None:
        ended.append(Path(f"/proc/{group}").exists())
        killpg(group, number)

    monkeypatch.setattr("os.killpg", watched)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    child = subprocess.Popen(["true"], start_new_session=True)
    wait_until(lambda: run_stack.exit_code(child) is not None)
    assert run_stack.ended_early({"server": child}) == 1
    run_stack.end({"server": child})
    assert ended == [True]
    assert child.returncode == 0
