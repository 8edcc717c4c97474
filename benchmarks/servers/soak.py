"""Soak test: streams, some of which hang up or are damaged; checks for leaks and for harm to other streams.

    python -m benchmarks soak [--seconds 600] [--streams 64] [--hang-ups 0.3] [--bad-bodies 0.1]

Starts its own server on 127.0.0.1. Fails if an undisturbed answer is wrong, if a damaged body gets anything but a 4xx,
if memory, threads or descriptors grow, or if places and KV pages are not all free at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from twofold.tools.loadgen.answer_stream import AnswerStream, MalformedStreamError
from twofold.tools.loadgen.http_client import HttpClient, HttpStatusError
from twofold.tools.loadgen.server_process import ServerProcess
from twofold.tools.loadgen.workload import CHAT

from benchmarks.scenario import ROOT, Report, Scenario, positive, say
from benchmarks.servers.processes import num_descriptors, num_threads, resident_bytes, serving

GROWTH_BYTES: Final = 32 << 20
"""Memory that may come after the first fifth of the run: allocators settle, nothing more."""
POOLED_THREADS: Final = 8
"""Threads that pools start on first use."""
FLAGS: Final[dict[str, Mapping[str, Any]]] = {
    "--seconds": {"type": float, "default": 600.0},
    "--streams": {"type": positive, "default": 64},
    "--hang-ups": {"type": float, "default": 0.3, "help": "share of requests"},
    "--bad-bodies": {"type": float, "default": 0.1, "help": "share of requests"},
    "--accelerator": {"default": "emulated:rtx4090-pcie4"},
}
_BAD_BODIES: Final = (
    b"{", b"", b"\xff\xfe\x00", b"[]", b"null", b'{"messages": []}',
    b'{"messages": [{"role": "user"}], "n": 1e9}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
    b'{"messages": [{"role": "user", "content": "' + b"word " * 40_000 + b'"}]}',
    b"[" * 100_000,
    b'{"messages": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
)  # fmt: skip
"""Bodies that can never be answered."""
_WORDS: Final = ("fox", "king", "mill", "sea", "three", "golden")


def good_body(rng: random.Random) -> bytes:
    words = " ".join(rng.choice(_WORDS) for _ in range(rng.randint(3, 300)))
    body = {
        "messages": [{"role": "user", "content": f"Tell me of {words}."}],
        "max_tokens": rng.randint(1, 120),
        "temperature": rng.choice((0, 0.8)),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


async def one_client(
    server: ServerProcess, seed: int, until: float, args: argparse.Namespace, seen: collections.Counter[str]
) -> None:
    rng = random.Random(seed)  # noqa: S311
    while time.monotonic() < until:
        draw = rng.random()
        try:
            if draw < args.bad_bodies:
                seen[await outcome_of_damaged(server, rng.choice(_BAD_BODIES))] += 1
            elif draw < args.bad_bodies + args.hang_ups:
                await ask(server, good_body(rng), stop_after=rng.randint(0, 12))
                seen["hung up"] += 1
            else:
                (await ask(server, good_body(rng))).end()
                seen["whole"] += 1
        except (HttpStatusError, MalformedStreamError) as error:
            seen[f"failed: {error.kind}: {error}"] += 1
        except OSError as error:
            seen[f"failed: {type(error).__name__}"] += 1


async def ask(server: ServerProcess, body: bytes, stop_after: int | None = None) -> AnswerStream:
    """stop_after: hang up after so many pieces of text, as a client does that lost interest; 0: at the first line."""
    answer = AnswerStream(time.monotonic())

    def take(line: bytes, at_s: float) -> bool:
        answer.line(line, at_s)
        return stop_after is not None and len(answer.pieces) >= stop_after

    await HttpClient(server.url).lines(CHAT, body, take)
    return answer


async def outcome_of_damaged(server: ServerProcess, body: bytes) -> str:
    try:
        await ask(server, body)
    except HttpStatusError as error:
        return "refused" if 400 <= error.status < 500 else f"damaged body got {error.status}"
    return "damaged body got 200"


async def soak(server: ServerProcess, args: argparse.Namespace) -> Report:
    before, threads_before = await idle_state(server), num_threads(server)
    seen: collections.Counter[str] = collections.Counter()
    begun = time.monotonic()
    until = begun + args.seconds
    clients = [asyncio.create_task(one_client(server, n, until, args, seen)) for n in range(args.streams)]
    memory: list[tuple[float, int]] = []
    while any(not client.done() for client in clients):
        await asyncio.sleep(min(5.0, args.seconds / 20))
        memory.append((time.monotonic() - begun, resident_bytes(server)))
        say(f"{memory[-1][0]:6.0f} s  {memory[-1][1] / 1e6:7.1f} MB  {dict(seen)}")
    await asyncio.gather(*clients)
    after, threads_after = await idle_state(server), num_threads(server)
    settled = max(size for at, size in memory if at <= args.seconds / 5)
    growth = max(size for at, size in memory if at > args.seconds / 2) - settled
    expected = ("whole", "refused", "hung up")
    problems = [f"{count} × {what}" for what, count in seen.items() if what not in expected]
    if threads_after > threads_before + POOLED_THREADS:
        problems.append(f"{threads_before} threads before, {threads_after} after")
    if growth > GROWTH_BYTES:
        problems.append(f"memory grew by {growth / 1e6:.1f} MB")
    changed = (name for name in before if after[name] != before[name])
    problems += [f"{name}: {before[name]} before, {after[name]} after" for name in changed]
    about = {"seconds": args.seconds, "streams": args.streams, "seen": dict(seen), "growth_mb": growth / 1e6}
    return {**about, "idle_again": after, "problems": problems}


async def idle_state(server: ServerProcess) -> dict[str, float]:
    """Figures that must return to their start values when idle: places, KV pages, descriptors."""
    for _ in range(100):
        text = await HttpClient(server.url).text("/metrics")
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        state = {name: float(re.search(rf"^{name}(?:{{.*?}})? (\S+)$", text, re.M)[1]) for name in names}  # type: ignore[index]
        if not any(state.values()):
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)  # closed connections leave the descriptor table a moment later
    return state | {"descriptors": num_descriptors(server)}


def measure(args: argparse.Namespace) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--accelerator", args.accelerator, "--max-num-seqs", str(args.streams)]
        flags += ["--telemetry-url", f"sqlite:///{folder}/soak.db"]
        log = Path(folder) / "server.log"
        with serving(ROOT, flags, log) as server:
            report = asyncio.run(soak(server, args))
        logged = log.read_text()
    if "Traceback" in logged or "ERROR" in logged:
        report["problems"].append(f"the server logged errors:\n{logged[-3000:]}")
    return report


def show(report: Report) -> str:
    line = (
        f"{report['seconds']:.0f} s, {report['streams']} streams: {report['seen']}; memory "
        f"{report['growth_mb']:+.1f} MB; idle again: {report['idle_again']}"
    )
    return "\n".join([line, *(report["problems"] or ["nothing leaked, no other request was affected"])])


SCENARIO: Final = Scenario(measure, show, FLAGS, failed=lambda report: bool(report["problems"]))
