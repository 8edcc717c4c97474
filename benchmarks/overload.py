"""Ten times as many requests as a server can answer: are those taken answered as well, the others refused at once?

    python -m benchmarks.overload [--seconds 30] [--places 8] [--tokens 64] [--factor 10]

Against a server of its own on 127.0.0.1, the bundled model. First its capacity: as many streams as it has places, one
request after the other. Then requests arrive by chance (Poisson) at that rate times the factor, and the queue holds as
many as there are places. What is promised to those that are taken follows from the capacity: the first token within the
time that the queue and one's own place take (--slo-queues answers one after the other), each further one within
--slo-tpot times the time it takes at capacity. Fails if fewer than 99 % of them are answered like that, if a refusal is
no 429 or 503 with Retry-After, or if refusals take longer than --refusal-ms (95 % of them).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from twofold.loadgen.answer_stream import AnswerStream, MalformedStreamError
from twofold.loadgen.arrivals import arrival_times
from twofold.loadgen.http_client import HttpClient, HttpStatusError
from twofold.loadgen.metrics import percentile
from twofold.loadgen.server_process import ServerProcess
from twofold.loadgen.workload import COMPLETIONS

from benchmarks.server_process import serving

HERE = Path(__file__).resolve().parents[1]
PROMPT_TOKENS = 32


@dataclass
class Seen:
    """What became of requests."""

    answers: list[tuple[float, float, float]] = field(default_factory=list)
    """Of those that were taken: ms to the first token, ms of each further one, ms in all."""
    refusals_ms: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def ask(self, client: HttpClient, number: int, tokens: int) -> None:
        rng = random.Random(number)  # noqa: S311
        body = {
            "prompt": [rng.randrange(10, 1000) for _ in range(PROMPT_TOKENS)],
            "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        begun = time.monotonic()
        answer = AnswerStream(begun)
        try:
            await client.lines(
                COMPLETIONS, json.dumps(body).encode(), lambda line: answer.line(line, time.monotonic())
            )
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

    def column(self, place: int) -> list[float]:
        return [answer[place] for answer in self.answers]


async def at_capacity(client: HttpClient, args: argparse.Namespace) -> tuple[Seen, float]:
    """And the answers per second."""
    seen, numbers = Seen(), itertools.count()
    begun = time.monotonic()

    async def one_user() -> None:
        while time.monotonic() - begun < args.seconds / 2:
            await seen.ask(client, next(numbers), args.tokens)

    await asyncio.gather(*(one_user() for _ in range(args.places)))
    return seen, len(seen.answers) / (time.monotonic() - begun)


async def overloaded(client: HttpClient, rate: float, args: argparse.Namespace) -> Seen:
    seen = Seen()
    begun = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for number, at_s in enumerate(arrival_times(rate, 1.0, 0)):
            if at_s > args.seconds:
                break
            await asyncio.sleep(begun + at_s - time.monotonic())
            tasks.create_task(seen.ask(client, 1_000_000 + number, args.tokens))
    return seen


def told(name: str, seen: Seen) -> str:
    def of(values: list[float]) -> str:
        return "–" if not values else " / ".join(f"{percentile(values, q) or 0:.1f}" for q in (50, 95, 99))

    return (
        f"{name}: {len(seen.answers)} answered, TTFT {of(seen.column(0))} ms, TPOT {of(seen.column(1))} ms "
        f"(50 / 95 / 99 %); {len(seen.refusals_ms)} refused after {of(seen.refusals_ms)} ms"
    )


async def run(server: ServerProcess, args: argparse.Namespace) -> int:
    client = HttpClient(server.url)
    await Seen().ask(client, 0, args.tokens)
    calm, rate = await at_capacity(client, args)
    print(told(f"capacity, {args.places} streams, {rate:.1f} requests/s", calm), flush=True)
    ttft_ms = args.slo_queues * statistics.median(calm.column(2))
    tpot_ms = args.slo_tpot * statistics.median(calm.column(1))
    seen = await overloaded(client, args.factor * rate, args)
    print(told(f"{args.factor:g} x, {args.factor * rate:.1f} requests/s", seen))
    good = sum(ttft <= ttft_ms and tpot <= tpot_ms for ttft, tpot, _ in seen.answers)
    share = good / max(len(seen.answers), 1)
    print(f"{100 * share:.1f} % of those taken had TTFT <= {ttft_ms:.0f} ms and TPOT <= {tpot_ms:.1f} ms")
    problems = [*calm.problems, *seen.problems][:10]
    if share < 0.99:
        problems.append(f"{len(seen.answers) - good} of {len(seen.answers)} that were taken came late")
    if not seen.refusals_ms or (percentile(seen.refusals_ms, 95) or 0.0) > args.refusal_ms:
        problems.append("refusals were not at once")
    print("\n".join(problems) or "those taken were served as promised, the others refused at once")
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--places", type=int, default=8, help="requests that run, and as many that wait")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--slo-queues", type=float, default=3.0)
    parser.add_argument("--slo-tpot", type=float, default=3.0)
    parser.add_argument("--refusal-ms", type=float, default=50.0)
    parser.add_argument("--accelerator", default="none")
    args = parser.parse_args()
    flags = [
        "--accelerator",
        args.accelerator,
        "--max-num-seqs",
        str(args.places),
        "--max-waiting",
        str(args.places),
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(HERE, flags, Path(folder) / "server.log") as server,
    ):
        return asyncio.run(run(server, args))


if __name__ == "__main__":
    sys.exit(main())
