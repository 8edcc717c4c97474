"""Ten times as many requests as a server can answer: are those taken answered as well, the others refused at once?

    python -m benchmarks.overload [--seconds 30] [--rounds 5] [--places 8] [--tokens 64] [--factor 10] [--against DIR]

Against a server of its own on 127.0.0.1, the bundled model. First its capacity: as many streams as it has places, one
request after the other. Then requests arrive by chance (Poisson) at that rate times the factor, and the queue holds as
many as there are places. Both in turn, several rounds: a machine's speed drifts, and what is promised follows from the
capacity: the first token within the time that the queue and one's own place take (--slo-queues answers one after the
other), each further one within --slo-tpot times the time it takes at capacity. Fails if fewer than 99 % of those taken
are answered like that, if a refusal is no 429 or 503 with Retry-After, or if refusals take longer than --refusal-ms
(95 % of them).

Reports the client's share of a core, and the time the machine's host took from both (steal). With --against another
checkout's server is measured in the same rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from twofold.tools.loadgen.answer_stream import AnswerStream, MalformedStreamError
from twofold.tools.loadgen.arrivals import arrival_times
from twofold.tools.loadgen.http_client import HttpClient, HttpStatusError
from twofold.tools.loadgen.metrics import percentile
from twofold.tools.loadgen.server_process import ServerProcess
from twofold.tools.loadgen.workload import COMPLETIONS

from benchmarks.server_process import serving

HERE = Path(__file__).resolve().parents[1]
PROMPT_TOKENS = 32


@dataclass
class Seen:
    """Outcomes of requests."""

    answers: list[tuple[float, float, float]] = field(default_factory=list)
    """Per accepted request: ms to the first token, ms per further token, ms in total."""
    refusals_ms: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def ask(self, client: HttpClient, body: bytes, tokens: int) -> None:
        begun = time.monotonic()
        answer = AnswerStream(begun)
        try:
            await client.lines(COMPLETIONS, body, answer.line)
            answer.end()
        except HttpStatusError as refusal:
            if refusal.status in (429, 503) and refusal.retry_after:
                self.refusals_ms.append(1e3 * (time.monotonic() - begun))
            else:
                self.problems.append(f"{refusal.kind}, Retry-After {refusal.retry_after}")
        except (MalformedStreamError, OSError) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
        else:
            first, last = answer.piece_s[0], answer.piece_s[-1]
            self.answers.append(
                (1e3 * (first - begun), 1e3 * (last - first) / max(tokens - 1, 1), 1e3 * (last - begun))
            )

    def add(self, other: Seen) -> None:
        self.answers += other.answers
        self.refusals_ms += other.refusals_ms
        self.problems += other.problems

    def column(self, place: int) -> list[float]:
        return [answer[place] for answer in self.answers]


def body_of(number: int, tokens: int) -> bytes:
    rng = random.Random(number)  # noqa: S311
    body = {
        "prompt": [rng.randrange(10, 1000) for _ in range(PROMPT_TOKENS)],
        "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    return json.dumps(body).encode()


async def at_capacity(client: HttpClient, seconds: float, args: argparse.Namespace) -> tuple[Seen, float]:
    """Outcomes at capacity, and the answers per second."""
    seen, numbers = Seen(), itertools.count()
    begun = time.monotonic()

    async def one_user() -> None:
        while time.monotonic() - begun < seconds:
            await seen.ask(client, body_of(next(numbers), args.tokens), args.tokens)

    await asyncio.gather(*(one_user() for _ in range(args.places)))
    return seen, len(seen.answers) / (time.monotonic() - begun)


async def overloaded(
    client: HttpClient, rate: float, seconds: float, args: argparse.Namespace
) -> tuple[Seen, float]:
    """Outcomes at arrival rate `rate`, and the answers per second."""
    moments = list(itertools.takewhile(lambda at_s: at_s < seconds, arrival_times(rate, 1.0, 0)))
    # Made beforehand: under load the client and the server share the machine.
    bodies = [body_of(1_000_000 + number, args.tokens) for number in range(len(moments))]
    seen = Seen()
    begun = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for at_s, body in zip(moments, bodies, strict=True):
            await asyncio.sleep(begun + at_s - time.monotonic())
            tasks.create_task(seen.ask(client, body, args.tokens))
    return seen, len(seen.answers) / (time.monotonic() - begun)


def told(name: str, seen: Seen) -> str:
    def of(values: list[float]) -> str:
        return "–" if not values else " / ".join(f"{percentile(values, q) or 0:.1f}" for q in (50, 95, 99))

    return (
        f"{name}: {len(seen.answers)} answered, TTFT {of(seen.column(0))} ms, TPOT {of(seen.column(1))} ms "
        f"(50 / 95 / 99 %); {len(seen.refusals_ms)} refused after {of(seen.refusals_ms)} ms"
    )


def stolen_s() -> float:
    """Steal time in core seconds since the machine started; 0 where it is not reported."""
    with contextlib.suppress(OSError, LookupError):
        return int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")
    return 0.0


class Side:
    """One server and what became of all its rounds."""

    def __init__(self, name: str, server: ServerProcess, args: argparse.Namespace) -> None:
        self.name = name
        self._args = args
        self._client = HttpClient(server.url)
        self._calm, self._flood = Seen(), Seen()
        self._rates: list[tuple[float, float]] = []
        """Answers per second at capacity and beyond."""
        self._slos: list[tuple[float, float]] = []
        """Latency objective of each round: ms to the first token, ms per further token."""
        self._num_good = 0
        self._client_s = self._stolen_s = self._wall_s = 0.0

    async def warm(self) -> None:
        await Seen().ask(self._client, body_of(0, self._args.tokens), self._args.tokens)

    async def round(self, seconds: float) -> None:
        args = self._args
        calm, rate = await at_capacity(self._client, seconds / 3, args)
        ttft_ms = args.slo_queues * statistics.median(calm.column(2))
        tpot_ms = args.slo_tpot * statistics.median(calm.column(1))
        client_s, stolen, begun = time.process_time(), stolen_s(), time.monotonic()
        flood, answered = await overloaded(self._client, args.factor * rate, seconds * 2 / 3, args)
        self._client_s += time.process_time() - client_s
        self._stolen_s += stolen_s() - stolen
        self._wall_s += time.monotonic() - begun
        self._num_good += sum(ttft <= ttft_ms and tpot <= tpot_ms for ttft, tpot, _ in flood.answers)
        self._rates.append((rate, answered))
        self._slos.append((ttft_ms, tpot_ms))
        self._calm.add(calm)
        self._flood.add(flood)

    def problems(self) -> list[str]:
        """Tell what was seen, and what was not as promised."""
        args, calm, flood, name = self._args, self._calm, self._flood, self.name
        rate, answered = (statistics.median(column) for column in zip(*self._rates, strict=True))
        ttft_ms, tpot_ms = (statistics.median(column) for column in zip(*self._slos, strict=True))
        kept = statistics.median(beyond / at for at, beyond in self._rates)
        print(told(f"{name}: capacity, {args.places} streams, {rate:.1f} requests/s", calm))
        print(told(f"{name}: {args.factor:g} x, {answered:.1f} requests/s ({kept:.2f} of capacity)", flood))
        print(
            f"{name}: of a core the client took {100 * self._client_s / self._wall_s:.0f} %, the machine's host "
            f"{100 * self._stolen_s / self._wall_s:.0f} %"
        )
        num_late = len(flood.answers) - self._num_good
        share = self._num_good / max(len(flood.answers), 1)
        print(
            f"{name}: {100 * share:.1f} % of those taken had TTFT <= {ttft_ms:.0f} ms and TPOT <= {tpot_ms:.1f} ms "
            "(of each round's own capacity; medians of the rounds)"
        )
        problems = [*calm.problems, *flood.problems][:10]
        if share < 0.99:
            problems.append(f"{num_late} of {len(flood.answers)} that were taken came late")
        if not flood.refusals_ms or (percentile(flood.refusals_ms, 95) or 0.0) > args.refusal_ms:
            problems.append("refusals were not at once")
        return [f"{name}: {problem}" for problem in problems]


async def run(servers: dict[str, ServerProcess], args: argparse.Namespace) -> int:
    sides = [Side(name, server, args) for name, server in servers.items()]
    for side in sides:
        await side.warm()
    for _ in range(args.rounds):
        for side in sides:
            await side.round(args.seconds / args.rounds)
    problems = [problem for side in sides for problem in side.problems()]
    print("\n".join(problems) or "those taken were served as promised, the others refused at once")
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of a server, a third of them at capacity"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--places", type=int, default=8, help="requests that run, and as many that wait")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--slo-queues", type=float, default=3.0)
    parser.add_argument("--slo-tpot", type=float, default=3.0)
    parser.add_argument("--refusal-ms", type=float, default=50.0)
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="a second checkout, built, measured in turn"
    )
    parser.add_argument("--accelerator", default="none")
    args = parser.parse_args()
    places = str(args.places)
    flags = ["--accelerator", args.accelerator, "--max-num-seqs", places, "--max-waiting", places]
    checkouts = {"this": HERE} | ({"other": args.against.resolve()} if args.against else {})
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(serving(checkout, flags, Path(folder) / f"{name}.log"))
            for name, checkout in checkouts.items()
        }
        return asyncio.run(run(servers, args))


if __name__ == "__main__":
    sys.exit(main())
