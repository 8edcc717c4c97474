"""Cost of the fleet's router, and throughput of two replicas against one.

    python -m benchmarks.fleet overhead [--requests 200]      # one stream: TTFT behind the router minus TTFT without it
    python -m benchmarks.fleet throughput [--seconds 20]      # two replicas of one core each against one, closed loop

`overhead` starts one server alone and one replica behind the router, with the same flags, and asks them in turn with
new prompts of one length. It prints the medians and the median difference of the pairs. `throughput` pins each replica
to a core of its own (router and clients run where the system puts them) and alternates the two fleets. Both need a
machine with nothing else to do and twofold[ray]; `throughput` needs a further core for router and clients.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from twofold.tools.loadgen.http_client import HttpClient
from twofold.tools.loadgen.server_process import ServerProcess, serving

FLAGS = ("--accelerator", "none", "--cpu-threads", "1", "--no-auto-fit", "--seed", "1")
WORDS = ["fox", "king", "forest", "river", "castle", "old", "wise", "clever", "bird", "stone", "snow", "wolf"]
REPLICA = "ServeReplica:twofold:twofold-replica"


def prompt(number: int, num_words: int = 100) -> str:
    """A text that shares no page with another number's."""
    draw = random.Random(number)  # noqa: S311 (the same prompts in every run)
    return " ".join(draw.choice(WORDS) for _ in range(num_words))


async def answer(client: HttpClient, number: int, max_tokens: int) -> float:
    """Stream an answer; seconds until its first text."""
    body = {
        "messages": [{"role": "user", "content": prompt(number)}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    first: list[float] = []

    def line(data: bytes, at_s: float) -> None:
        if not first and b'"content":"' in data.replace(b": ", b":") and b'"content":""' not in data:
            first.append(at_s)

    begin = asyncio.get_running_loop().time()
    await client.lines("/v1/chat/completions", json.dumps(body).encode(), line)
    return first[0] - begin


@contextlib.contextmanager
def fleet(folder: Path, num_replicas: int) -> Iterator[ServerProcess]:
    """Replicas behind the router, each pinned to one core."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "twofold.tools.cli", "serve", "--port", str(port), *FLAGS, "--ray"]
    command += ["--num-replicas", str(num_replicas), "--cpus-per-replica", "0.5"]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    log = folder / f"fleet-{num_replicas}.log"
    with serving(command, log, timeout_s=180, environment=environment) as server:
        children = psutil.Process(server.pid).children(recursive=True)
        replicas = [each for each in children if any(REPLICA in word for word in each.cmdline())]
        if len(replicas) != num_replicas:
            raise SystemExit(f"{len(replicas)} of {num_replicas} replicas were found")
        for core, replica in enumerate(replicas):
            for thread in replica.threads():
                os.sched_setaffinity(thread.id, {core})
        yield server


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "twofold.tools.cli", "serve", "--port", "0", *FLAGS]
    with serving(command, folder / "alone.log", timeout_s=180) as server:
        for thread in psutil.Process(server.pid).threads():
            os.sched_setaffinity(thread.id, {0})
        yield server


async def overhead(direct: ServerProcess, routed: ServerProcess, num_requests: int) -> None:
    clients = HttpClient(direct.url), HttpClient(routed.url)
    taken: tuple[list[float], list[float]] = [], []
    for number in range(-10, num_requests):  # the first ten warm up
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            seconds = await answer(clients[which], number, 4)
            if number >= 0:
                taken[which].append(seconds)
    differences = [behind - without for without, behind in zip(*taken, strict=True)]
    without, behind = (1e3 * statistics.median(each) for each in taken)
    print(f"TTFT, median of {num_requests}: alone {without:.2f} ms, behind the router {behind:.2f} ms")
    print(f"difference, median of the pairs: {1e3 * statistics.median(differences):.2f} ms")


async def tokens_per_s(
    server: ServerProcess, seconds: float, first: int, users: int = 8, tokens: int = 64
) -> float:
    """Closed loop of `users`; answer tokens per second."""
    client, end, done = HttpClient(server.url), time.monotonic() + seconds, 0

    async def user(number: int) -> None:
        nonlocal done
        while time.monotonic() < end:
            number += users
            await answer(client, first + number, tokens)
            done += tokens

    begin = time.monotonic()
    await asyncio.gather(*(user(number) for number in range(users)))
    return done / (time.monotonic() - begin)


def throughput(folder: Path, seconds: float, rounds: int) -> None:
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(rounds):
        for count in (1, 2):
            with fleet(folder, count) as server:
                asyncio.run(tokens_per_s(server, 3.0, 10**6 * (turn + 1)))
                speeds[count].append(asyncio.run(tokens_per_s(server, seconds, 10**7 * (turn + 1))))
                print(f"  {count} replicas: {speeds[count][-1]:.1f} tokens/s")
    one, two = (statistics.median(speeds[count]) for count in (1, 2))
    print(f"one replica {one:.1f}, two replicas {two:.1f} tokens/s: {two / one:.2f} x")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("overhead", "throughput"))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.what == "throughput":
            throughput(folder, args.seconds, args.rounds)
            return 0
        with alone(folder) as direct, fleet(folder, 1) as routed:
            asyncio.run(overhead(direct, routed, args.requests))
    return 0


if __name__ == "__main__":
    sys.exit(main())
