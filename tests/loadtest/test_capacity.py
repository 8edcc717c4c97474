"""`twofold loadtest capacity` on a server whose capacity follows from its places and its service time.

The server sleeps instead of computing, so the result does not depend on the machine's load.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PLACES, SERVICE_S = 4, 0.25
CAPACITY = PLACES / SERVICE_S


class QueueingServer:
    """An OpenAI server with `PLACES` places; each answer occupies one for `SERVICE_S`, in the order of arrival."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.samples: list[dict[str, Any]] = []
        self.places = asyncio.Semaphore(PLACES)
        self.server = self.loop.run_until_complete(asyncio.start_server(self._answer, "127.0.0.1", 0))
        self.port = self.server.sockets[0].getsockname()[1]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        sizes = [int(line[15:]) for line in head.splitlines() if line.startswith("content-length:")]
        body = json.loads(await reader.readexactly(sizes[0])) if sizes else {}
        path = head.split()[1]
        if path == "/v1/models":
            self._json(writer, {"data": [{"id": "m"}]})
        elif path == "/internal/load_samples":
            self.samples += body["samples"]
            self._json(writer, {"accepted": len(body["samples"])})
        elif path == "/tokenize":
            text = body.get("prompt") or body["messages"][0]["content"]
            self._json(writer, {"tokens": list(range(len(text.split()))), "count": len(text.split())})
        else:
            await self._stream(writer)
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        async with self.places:
            await asyncio.sleep(SERVICE_S)
        for delta, reason in (({"content": "x"}, None), ({}, "stop")):
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            writer.write(b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n")
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()

    def _json(self, writer: asyncio.StreamWriter, value: object) -> None:
        content = json.dumps(value).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content
        )


@pytest.fixture
def server() -> Iterator[QueueingServer]:
    server = QueueingServer()
    thread = threading.Thread(target=server.loop.run_forever)
    thread.start()
    yield server
    server.loop.call_soon_threadsafe(server.loop.stop)
    thread.join()
    server.loop.close()


def capacity(server: QueueingServer, folder: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    file = folder / "capacity.json"
    command = [sys.executable, "-m", "twofold.tools.cli", "loadtest", "capacity"]
    done = subprocess.run(
        [*command, "--host", f"http://127.0.0.1:{server.port}", "--json", str(file), *flags],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert file.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(file.read_text())["capacity"], done.stdout


def test_a_rate_below_the_lowest_is_not_found(server: QueueingServer, tmp_path: Path) -> None:
    flags = ("--slo", "ttft_p95_ms=1", "--low", "4", "--seconds", "1", "--repeats", "1")
    code, found, said = capacity(server, tmp_path, *flags)
    assert (code, found["held"], found["missed"], found["num_runs"]) == (1, None, 4.0, 1)
    assert "give a lower --low" in said
    assert {sample["stage"] for sample in server.samples} == {"4/s"}


@pytest.mark.slow
def test_the_same_rate_is_found_twice_and_it_is_the_servers(server: QueueingServer, tmp_path: Path) -> None:
    flags = ("--slo", "ttft_p95_ms=900", "--low", "10", "--seconds", "10", "--repeats", "1")
    rates = []
    for _ in range(2):
        code, found, said = capacity(server, tmp_path, *flags)
        assert code == 0, said
        assert found["complete"]
        rates.append(found["held"])
    assert max(rates) / min(rates) < 1.1, rates
    # Without a limit the places serve 16 per second; waiting at most 650 ms in 95 % of the cases costs a part of it.
    assert 0.7 * CAPACITY < min(rates) <= max(rates) < 1.15 * CAPACITY
