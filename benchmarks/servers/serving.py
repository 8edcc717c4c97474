"""Tokens per second, time to first token and gaps over HTTP at 1, 4, 16 and 64 streams; greedy and with the model's own
sampling; telemetry off and on. With --against another checkout's server is measured in the same rounds, in turn.

    python -m benchmarks serving [--streams 1,4,16,64] [--rounds 3] [--against DIR] [--accelerator none]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

from twofold.tools.loadgen.generator import LoadPlan
from twofold.tools.loadgen.server_process import ServerProcess
from twofold.tools.loadgen.workload import PromptShape

from benchmarks.scenario import Report, Scenario, common, numbers, say
from benchmarks.servers.processes import checkouts, figures, send, serving

PROMPT_WORDS: Final = 10
FIGURES: Final = ("output_throughput", "median_ttft_ms", "p99_itl_ms")
FLAGS: Final[dict[str, Mapping[str, Any]]] = {
    **common("--rounds", "--against", "--accelerator"),
    "--streams": {"type": numbers, "default": [1, 4, 16, 64]},
    "--tokens": {"type": int, "default": 128, "help": "of each answer"},
}


@contextlib.contextmanager
def servers(args: argparse.Namespace, telemetry: bool) -> Iterator[dict[str, ServerProcess]]:
    """One server per checkout, all running at once: a server without requests sleeps."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = {}
        for name, checkout in checkouts(args.against).items():
            flags = ["--accelerator", args.accelerator, "--max-num-seqs", str(max(args.streams))]
            flags += ["--telemetry-url", f"sqlite:///{folder / name}.db"] if telemetry else []
            running[name] = stack.enter_context(serving(checkout, flags, folder / f"{name}.log"))
        yield running


def one_round(url: str, streams: int, tokens: int, greedy: bool) -> dict[str, float]:
    """All streams start together; the rate is all tokens over the time until the last stream ends."""
    plan = LoadPlan(num_prompts=streams, max_concurrency=streams)
    found = figures(send(url, plan, PromptShape(PROMPT_WORDS, tokens), greedy=greedy))
    return {name: found[name] or 0.0 for name in FIGURES}


def measure(args: argparse.Namespace) -> Report:
    rows = []
    for telemetry in (False, True):
        with servers(args, telemetry) as running:
            for greedy, streams in product((True, False), args.streams):
                rounds = _rounds(running, args, greedy, streams)
                rows.append({"telemetry": telemetry, "greedy": greedy, "streams": streams, "rounds": rounds})
                say(line(rows[-1]))
    return {"rows": rows}


def _rounds(
    running: Mapping[str, ServerProcess], args: argparse.Namespace, greedy: bool, streams: int
) -> dict[str, list[dict[str, float]]]:
    """Figures of each server, in turns; the first of each warms it."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in running}
    for _, (name, server) in product(range(args.rounds + 1), running.items()):
        rounds[name].append(one_round(server.url, streams, args.tokens, greedy))
    return {name: found[1:] for name, found in rounds.items()}


def line(row: Mapping[str, Any]) -> str:
    cells = []
    for server, many in row["rounds"].items():
        rate, ttft, gap = (statistics.median(got[name] for got in many) for name in FIGURES)
        cells.append(f"{server} {rate:8.0f} · {ttft:6.1f} · {gap:6.1f}")
    if "other" in row["rounds"]:
        pairs = zip(row["rounds"]["this"], row["rounds"]["other"], strict=True)
        cells.append(f"ratio {statistics.median(a[FIGURES[0]] / b[FIGURES[0]] for a, b in pairs):.2f}")
    kind = ("on" if row["telemetry"] else "off", "greedy" if row["greedy"] else "default", row["streams"])
    return f"{kind[0]:<10}{kind[1]:<9}{kind[2]:>8}  " + "   ".join(cells)


def show(report: Report) -> str:
    head = f"{'telemetry':<10}{'sampling':<9}{'streams':>8}  tokens/s · TTFT p50 ms · gap p99 ms, medians"
    return "\n".join([head, *map(line, report["rows"])])


SCENARIO: Final = Scenario(measure, show, FLAGS)
