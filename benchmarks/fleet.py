"""Cost of the fleet's router, throughput of two replicas against one, and the simulation against a real run.

    python -m benchmarks.fleet overhead [--requests 200]      # one stream: TTFT behind the router minus TTFT without it
    python -m benchmarks.fleet throughput [--seconds 20]      # two replicas of one core each against one, closed loop
    python -m benchmarks.fleet simulation --database postgresql+psycopg://USER@HOST/EMPTY

`overhead` starts one server alone and one replica behind the router, with the same flags, and asks them in turn with
new prompts of one length. It prints the medians and the median difference of the pairs. `throughput` pins each replica
to a core of its own (router and clients run where the system puts them) and alternates the two fleets. Both need a
machine with nothing else to do and twofold[ray]; `throughput` needs a further core for router and clients.

`simulation` sends requests of drawn lengths at Poisson times to two replicas of a random model (Qwen3-30B's shape, 4
layers, 32 experts), fits step times to what they recorded, and predicts a second load of the same rate (`twofold lab
fleet`). Exit code 1 if the mean latency differs by more than 15 %. A step of that model takes milliseconds:
beside it, router and client take little of the replicas' cores. Other programs must take none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
from twofold.telemetry import queries
from twofold.tools.lab.fleet_simulation import Arrival, ReplicaLimits, StepTimes, simulate_fleet
from twofold.tools.loadgen.arrivals import arrivals_within
from twofold.tools.loadgen.http_client import HttpClient
from twofold.tools.loadgen.server_process import ServerProcess, serving

from benchmarks.peers.gguf_model import write_model
from benchmarks.peers.shapes import FULL_SHAPES

FLAGS = ("--accelerator", "none", "--cpu-threads", "1", "--no-auto-fit", "--seed", "1")
WORDS = ["fox", "king", "forest", "river", "castle", "old", "wise", "clever", "bird", "stone", "snow", "wolf"]
REPLICA = "ServeReplica:twofold:twofold-replica"


def prompt(number: int) -> str:
    """A text that shares no page with another number's."""
    draw = random.Random(number)  # noqa: S311 (the same prompts in every run)
    return " ".join(draw.choice(WORDS) for _ in range(100))


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
def fleet(folder: Path, num_replicas: int, *further: str) -> Iterator[ServerProcess]:
    """Replicas behind the router, each pinned to one core."""
    command = [
        sys.executable,
        "-m",
        "twofold.tools.cli",
        "serve",
        "--port",
        "0",
        *FLAGS,
        "--ray",
        *further,
    ]
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


async def load(url: str, rate: float, seed: int, num: int) -> float:
    """Send requests of drawn lengths at Poisson times; seconds until the last answer."""
    draw = random.Random(seed)  # noqa: S311 (the same load in every run)
    client, loop = HttpClient(url), asyncio.get_running_loop()
    bodies = [
        {
            "prompt": [draw.randrange(100, 30_000) for _ in range(draw.randint(20, 80))],
            "max_tokens": draw.randint(10, 60),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        for _ in range(num)
    ]
    begin = loop.time()

    async def one(number: int, due_s: float) -> None:
        await asyncio.sleep(begin + due_s - loop.time())
        await client.lines("/v1/completions", json.dumps(bodies[number]).encode(), lambda line, at_s: None)

    await asyncio.gather(*(one(*each) for each in enumerate(arrivals_within(rate, num / rate, seed))))
    return loop.time() - begin


@dataclass(frozen=True)
class Played:
    """What two replicas recorded of one load."""

    requests: list[queries.Request]
    steps: list[queries.StepCosts]


def played(url: str, db: queries.Database, rate: float, *, seed: int, num: int) -> Played:
    since_s = time.time()
    asyncio.run(load(url, rate, seed, num))
    time.sleep(3)  # the writers store what is queued
    runs = [run for run in queries.runs(db) if run.replica and run.is_live()]
    requests = [each for each in queries.finished_requests(db, runs) if each.received_s >= since_s]
    return Played(requests, [queries.step_costs(db, run, since_s=since_s) for run in runs])


def simulation(folder: Path, database: str, *, share: float, num: int) -> bool:
    """Whether the simulated mean latency is within 15 % of the measured one, at a share of the capacity."""
    model = folder / "random.gguf"
    write_model(model, replace(FULL_SHAPES["qwen3-30b-a3b"], layers=4, experts=32, vocab=32_768), "q4_k")
    with fleet(folder, 2, str(model), "--max-total-tokens", "8192", "--telemetry-url", database) as server:
        db = queries.open_database(database)
        asyncio.run(load(server.url, 4.0, 0, 8))
        rate = share * num / asyncio.run(load(server.url, 1e4, 1, num))
        first = played(server.url, db, rate, seed=2, num=num)
        second = played(server.url, db, rate, seed=3, num=num)
    times = StepTimes.fitted(
        *(
            np.concatenate([getattr(each, name) for each in first.steps])
            for name in ("num_decode", "num_prefill", "wall_s")
        )
    )
    begin_s = second.requests[0].received_s
    arrivals = [
        Arrival(each.received_s - begin_s, each.prompt_tokens, each.completion_tokens, each.cached_tokens)
        for each in second.requests
    ]
    overhead_s = statistics.fmean(each.submitted_s - each.received_s for each in first.requests)
    simulated = simulate_fleet(arrivals, [times] * 2, ReplicaLimits(), overhead_s=overhead_s)
    measured = [(each.finished_s or 0.0) - each.received_s for each in second.requests]
    print(f"{len(arrivals)} requests at {rate:.1f}/s ({share:.0%} of the capacity); {times}")
    for name, of in (
        ("mean", statistics.fmean),
        ("95th percentile", lambda them: np.percentile(list(them), 95)),
    ):
        here, there = of(measured), of(each.e2e_s for each in simulated)
        print(f"latency, {name}: measured {here:.3f} s, simulated {there:.3f} s, {there / here:.3f}")
    ratio = statistics.fmean(each.e2e_s for each in simulated) / statistics.fmean(measured)
    return abs(ratio - 1) <= 0.15


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("overhead", "throughput", "simulation"))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.4, help="of the capacity, for `simulation`")
    parser.add_argument("--database", help="empty PostgreSQL database for `simulation`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.what == "throughput":
            throughput(folder, args.seconds, args.rounds)
            return 0
        if args.what == "simulation":
            return int(not simulation(folder, args.database, share=args.share, num=args.requests))
        with alone(folder) as direct, fleet(folder, 1) as routed:
            asyncio.run(overhead(direct, routed, args.requests))
    return 0


if __name__ == "__main__":
    sys.exit(main())
