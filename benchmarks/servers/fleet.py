"""Cost of the fleet's router, and throughput of two replicas against one.

    python -m benchmarks fleet overhead [--requests 200]      # one stream: TTFT behind the router minus TTFT without it
    python -m benchmarks fleet throughput [--seconds 20]      # two replicas of one core each against one, closed loop

`overhead` starts one server alone and one replica behind the router, with the same flags, and asks them in turn with
new prompts of one length. It prints the medians and the median difference of the pairs. `throughput` pins each replica
to a core of its own (router and clients run where the system puts them) and alternates the two fleets. Both need a
machine with nothing else to do and twofold[ray]; `throughput` needs a further core for router and clients.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psutil
from twofold.tools.loadgen.generator import LoadPlan
from twofold.tools.loadgen.server_process import ServerProcess
from twofold.tools.loadgen.workload import PromptShape

from benchmarks.scenario import ROOT, BenchmarkError, Report, Scenario, common, positive
from benchmarks.servers.processes import figures, send, serving

_FLAGS: Final = ("--accelerator", "none", "--cpu-threads", "1", "--no-auto-fit", "--seed", "1")
_REPLICA: Final = "ServeReplica:twofold:twofold-replica"
_PROMPT: Final = 100
FLAGS: Final[dict[str, Mapping[str, Any]]] = {
    "what": {"choices": ("overhead", "throughput")},
    **common("--rounds"),
    "--requests": {"type": positive, "default": 200},
    "--seconds": {"type": float, "default": 20.0},
}


@contextlib.contextmanager
def fleet(folder: Path, num_replicas: int, *further: str) -> Iterator[ServerProcess]:
    """Replicas behind the router, each pinned to one core."""
    flags = [*further, *_FLAGS, "--ray", "--num-replicas", str(num_replicas), "--cpus-per-replica", "0.5"]
    with serving(ROOT, flags, folder / f"fleet-{num_replicas}.log") as server:
        children = psutil.Process(server.pid).children(recursive=True)
        replicas = [each for each in children if any(_REPLICA in word for word in each.cmdline())]
        if len(replicas) != num_replicas:
            raise BenchmarkError(f"{len(replicas)} of {num_replicas} replicas were found")
        for core, replica in enumerate(replicas):
            for thread in replica.threads():
                os.sched_setaffinity(thread.id, {core})
        yield server


def overhead(folder: Path, num_requests: int) -> Report:
    """Milliseconds to the first token, alone and behind the router."""
    taken: dict[str, list[float]] = {"alone": [], "through_router": []}
    with serving(ROOT, _FLAGS, folder / "alone.log", [0]) as alone, fleet(folder, 1) as routed:
        urls = {"alone": alone.url, "through_router": routed.url}
        for number in range(-10, num_requests):  # the first ten warm up
            for which in sorted(urls, reverse=bool(number % 2)):
                plan = LoadPlan(num_prompts=1, max_concurrency=1, seed=number)
                ttft_ms = figures(send(urls[which], plan, PromptShape(_PROMPT, 4)))["median_ttft_ms"]
                if number >= 0:
                    taken[which].append(ttft_ms)
    pairs = zip(taken["alone"], taken["through_router"], strict=True)
    medians = {name: statistics.median(each) for name, each in taken.items()}
    difference = statistics.median(through_router - without for without, through_router in pairs)
    line = f"alone {medians['alone']:.2f} ms, behind the router {medians['through_router']:.2f} ms"
    lines = [
        f"TTFT, median of {num_requests}: {line}",
        f"difference, median of the pairs: {difference:.2f} ms",
    ]
    return {"ms": taken, "lines": lines}


def throughput(folder: Path, seconds: float, rounds: int) -> Report:
    """Answer tokens per second of eight users in a closed loop."""
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(rounds):
        for count, found in speeds.items():
            with fleet(folder, count) as server:
                for number, duration_s in ((0, 3.0), (1, seconds)):
                    plan = LoadPlan(10**6, max_concurrency=8, duration_s=duration_s, seed=2 * turn + number)
                    rate = figures(send(server.url, plan, PromptShape(_PROMPT, 64)))["output_throughput"]
                found.append(rate)
    one, two = (statistics.median(speeds[count]) for count in (1, 2))
    line = f"one replica {one:.1f}, two replicas {two:.1f} tokens/s: {two / one:.2f} x"
    return {"tokens_per_s": speeds, "lines": [line]}


def measure(args: argparse.Namespace) -> Report:
    with tempfile.TemporaryDirectory() as name:
        if args.what == "throughput":
            return throughput(Path(name), args.seconds, args.rounds)
        return overhead(Path(name), args.requests)


SCENARIO: Final = Scenario(measure, lambda report: "\n".join(report["lines"]), FLAGS)
