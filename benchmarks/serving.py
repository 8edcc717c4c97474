"""Tokens per second, time to first token and gaps over HTTP at 1, 4, 16 and 64 streams; greedy and with the model's own
sampling; telemetry off and on. With --against another checkout's server is measured in the same rounds, in turn.

    python -m benchmarks.serving [--streams 1,4,16,64] [--rounds 3] [--against DIR] [--accelerator none]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.http_stream import TimedAnswer, post
from benchmarks.server_process import ServerProcess, serving

HERE = Path(__file__).resolve().parents[1]
PROMPTS = (
    "Tell me the story of a clever fox.",
    "Tell me of a king who had three daughters.",
    "Why is the sea salt?",
)


@dataclass(frozen=True)
class Figures:
    """One round: so many streams at once, each of the same length."""

    tokens_per_s: float
    ttft_ms: float
    """Median over the streams."""
    gap_p99_ms: float
    """Of all gaps between events with text."""


def request_body(number: int, tokens: int, greedy: bool) -> bytes:
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": number,
    }
    if greedy:
        body["temperature"] = 0
    return json.dumps(body).encode()


async def one_round(port: int, streams: int, tokens: int, greedy: bool) -> Figures:
    """All streams start together; the rate is all tokens over the time until the last stream ends."""
    bodies = [request_body(number, tokens, greedy) for number in range(streams)]
    loop = asyncio.get_running_loop()
    begun = loop.time()
    answers = await asyncio.gather(*(post(port, "/v1/chat/completions", body) for body in bodies))
    elapsed = loop.time() - begun
    for answer in answers:
        if not answer.complete:
            raise RuntimeError(f"an answer failed: status {answer.status}, {answer.error}")
    return figures(answers, elapsed)


def figures(answers: list[TimedAnswer], elapsed_s: float) -> Figures:
    gaps = sorted(
        b - a for answer in answers for a, b in zip(answer.token_s, answer.token_s[1:], strict=False)
    )
    return Figures(
        tokens_per_s=sum(answer.completion_tokens for answer in answers) / elapsed_s,
        ttft_ms=1e3 * statistics.median(answer.ttft_s or 0.0 for answer in answers),
        gap_p99_ms=1e3 * gaps[int(0.99 * (len(gaps) - 1))] if gaps else 0.0,
    )


@contextlib.contextmanager
def servers(
    checkouts: dict[str, Path], telemetry: bool, arguments: list[str]
) -> Iterator[dict[str, ServerProcess]]:
    """One server per checkout, all at once: whoever is not asked sleeps."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = {}
        for name, checkout in checkouts.items():
            url = ["--telemetry-url", f"sqlite:///{folder / name}.db"] if telemetry else []
            running[name] = stack.enter_context(
                serving(checkout, [*arguments, "--max-num-seqs", "64", *url], folder / f"{name}.log")
            )
        yield running


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="1,4,16,64")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--accelerator", default="none")
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="a second checkout, built, measured in turn"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="every round's figures")
    args = parser.parse_args()
    checkouts = {"this": HERE} | ({"other": args.against.resolve()} if args.against else {})
    results: list[dict[str, object]] = []
    print(
        f"{'telemetry':<10}{'sampling':<9}{'streams':>8}  tokens/s · TTFT p50 ms · gap p99 ms, medians of {args.rounds}"
    )
    for telemetry in (False, True):
        with servers(checkouts, telemetry, ["--accelerator", args.accelerator]) as running:
            for greedy in (True, False):
                for streams in map(int, args.streams.split(",")):
                    rounds: dict[str, list[Figures]] = {name: [] for name in running}
                    for turn in range(args.rounds + 1):
                        for name, server in running.items():
                            got = asyncio.run(one_round(server.port, streams, args.tokens, greedy))
                            if turn:  # the first warms both
                                rounds[name].append(got)
                    kind = ("on" if telemetry else "off", "greedy" if greedy else "default", streams)
                    print(_line(kind, rounds), flush=True)
                    results += [
                        {
                            "telemetry": kind[0],
                            "sampling": kind[1],
                            "streams": streams,
                            "server": name,
                            **vars(got),
                        }
                        for name, many in rounds.items()
                        for got in many
                    ]
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


def _line(kind: tuple[str, str, int], rounds: dict[str, list[Figures]]) -> str:
    cells = []
    for name, many in rounds.items():
        rate, ttft, gap = (
            statistics.median(getattr(got, field) for got in many)
            for field in ("tokens_per_s", "ttft_ms", "gap_p99_ms")
        )
        cells.append(f"{name} {rate:8.0f} · {ttft:6.1f} · {gap:6.1f}")
    if "other" in rounds:
        ratio = statistics.median(
            a.tokens_per_s / b.tokens_per_s for a, b in zip(rounds["this"], rounds["other"], strict=True)
        )
        cells.append(f"ratio {ratio:.2f}")
    return f"{kind[0]:<10}{kind[1]:<9}{kind[2]:>8}  " + "   ".join(cells)


if __name__ == "__main__":
    sys.exit(main())
