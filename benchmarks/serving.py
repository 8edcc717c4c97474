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
from itertools import product
from pathlib import Path

from twofold.quantise.texts import default_text
from twofold.tools.loadgen.generator import Load, LoadPlan
from twofold.tools.loadgen.http_client import HttpClient
from twofold.tools.loadgen.server_process import ServerProcess
from twofold.tools.loadgen.workload import CHAT, PromptShape, Workload

from benchmarks.server_process import serving

HERE = Path(__file__).resolve().parents[1]
PROMPT_WORDS = 10


FIGURES = ("output_throughput", "median_ttft_ms", "p99_itl_ms")


async def one_round(url: str, streams: int, tokens: int, greedy: bool) -> dict[str, float]:
    """All streams start together; the rate is all tokens over the time until the last stream ends."""
    extra: dict[str, object] = {"ignore_eos": True} | ({"temperature": 0} if greedy else {})
    work = Workload(CHAT, "tale", default_text().split(), extra)
    plan = LoadPlan(num_prompts=streams, max_concurrency=streams)
    figures = (await Load(HttpClient(url), work, PromptShape(PROMPT_WORDS, tokens), plan).run()).figures()
    if figures["failed"]:
        raise RuntimeError(f"answers failed: {figures['errors']}")
    return {name: figures[name] or 0.0 for name in FIGURES}


@contextlib.contextmanager
def servers(
    checkouts: dict[str, Path], telemetry: bool, arguments: list[str]
) -> Iterator[dict[str, ServerProcess]]:
    """One server per checkout, all running at once: a server without requests sleeps."""
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
            for greedy, streams in product((True, False), map(int, args.streams.split(","))):
                rounds = _rounds(running, args, streams, greedy=greedy)
                kind = ("on" if telemetry else "off", "greedy" if greedy else "default", streams)
                print(_line(kind, rounds), flush=True)
                where = dict(zip(("telemetry", "sampling", "streams"), kind, strict=True))
                results += [{**where, "server": name, **got} for name, many in rounds.items() for got in many]
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


def _rounds(
    running: dict[str, ServerProcess], args: argparse.Namespace, streams: int, *, greedy: bool
) -> dict[str, list[dict[str, float]]]:
    """Figures of each server, in turns."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in running}
    for turn, (name, server) in product(range(args.rounds + 1), running.items()):
        got = asyncio.run(one_round(server.url, streams, args.tokens, greedy))
        if turn:  # the first warms both
            rounds[name].append(got)
    return rounds


def _line(kind: tuple[str, str, int], rounds: dict[str, list[dict[str, float]]]) -> str:
    cells = []
    for server, many in rounds.items():
        rate, ttft, gap = (statistics.median(got[name] for got in many) for name in FIGURES)
        cells.append(f"{server} {rate:8.0f} · {ttft:6.1f} · {gap:6.1f}")
    if "other" in rounds:
        ratio = statistics.median(
            a[FIGURES[0]] / b[FIGURES[0]] for a, b in zip(rounds["this"], rounds["other"], strict=True)
        )
        cells.append(f"ratio {ratio:.2f}")
    return f"{kind[0]:<10}{kind[1]:<9}{kind[2]:>8}  " + "   ".join(cells)


if __name__ == "__main__":
    sys.exit(main())
