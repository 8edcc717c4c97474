"""`twofold loadtest capacity` on a server whose capacity follows from its places and its service time.

The server sleeps instead of computing. The search itself is tested in virtual time.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from twofold.tools.loadgen.capacity import Capacity, Search, highest_rate
from twofold.tools.loadgen.http_client import HttpClient
from twofold.tools.loadgen.loadtest_plan import CapacityPlan
from twofold.tools.loadgen.sample_store import SampleStore
from twofold.tools.loadgen.slo import parse_slos
from twofold.tools.loadgen.workload import CHAT, Workload
from virtual_loop import run_virtually

from loadtest.capacity import Measurements

PLACES, SERVICE_S = 4, 0.25
CAPACITY = PLACES / SERVICE_S
SEEDS = (0, 1, 2)


class QueueingServer:
    """An OpenAI server with `PLACES` places; each answer occupies one for `SERVICE_S`, in the order of arrival."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.samples: list[dict[str, Any]] = []
        self.places = asyncio.Semaphore(PLACES)
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
    server = QueueingServer(asyncio.new_event_loop())
    listening = server.loop.run_until_complete(asyncio.start_server(server.answer, "127.0.0.1", 0))
    server.port = listening.sockets[0].getsockname()[1]
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
    code, found, printed = capacity(server, tmp_path, *flags)
    assert (code, found["held"], found["missed"], found["num_runs"]) == (1, None, 4.0, 1)
    assert "give a lower --low" in printed
    assert {sample["stage"] for sample in server.samples} == {"4/s"}


QUICK = Search(10.0, 100.0, repeats=1)


def rate_found(seed: int, within: Search = QUICK, *, seconds: float = 8.0) -> Capacity:
    """A search in virtual time, so that nothing else on this machine changes its result."""

    async def search() -> Capacity:
        server = QueueingServer(asyncio.get_running_loop())
        listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        plan = CapacityPlan(parse_slos("ttft_p95_ms=900"), within, seconds=seconds, seed=seed)
        workload = Workload(CHAT, "random", ["a", "fox"], {"model": "m"})
        # Nothing listens at port 1: the samples are not stored.
        store = SampleStore("http://127.0.0.1:1", "capacity", None)
        async with listening:
            return await highest_rate(Measurements(client, workload, plan, store).holds, plan.search)

    found: Capacity = run_virtually(search())
    return found


@pytest.mark.slow
def test_the_same_rate_is_found_twice_and_it_is_the_servers() -> None:
    first, again, other = rate_found(0), rate_found(0), rate_found(7)
    rates = [found.held or 0.0 for found in (first, again, other)]
    assert all(found.complete for found in (first, again, other))
    assert rates[1] == pytest.approx(rates[0], rel=0.1)
    # The places serve 16 per second; other arrivals of eight seconds may come closer together.
    assert all(0.6 * CAPACITY < rate < 1.4 * CAPACITY for rate in rates), rates


@pytest.mark.slow
def test_other_seeds_find_the_same_rate() -> None:
    """With the default length and repetitions of a load: every rate within 10 % of their median."""
    rates = sorted(rate_found(seed, Search(10.0, 100.0), seconds=20.0).held or 0.0 for seed in SEEDS)
    print(f"\nrates found with {len(SEEDS)} seeds: {', '.join(f'{rate:.2f}' for rate in rates)}")
    assert rates[0] > 0
    assert rates == pytest.approx([statistics.median(rates)] * len(rates), rel=0.1)
