"""Gaps between the tokens of a stream with each level of telemetry, the longest among them, and CPU time per token.

    python -m benchmarks stalls [--levels off,step,expert] [--streams 1,8] [--rounds 3] [--seconds 100]

Each level's server is loaded for --seconds of every round, in turn; the others sleep meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from twofold.tools.loadgen.generator import LoadPlan
from twofold.tools.loadgen.server_process import ServerProcess
from twofold.tools.loadgen.workload import PromptShape

from benchmarks.scenario import ROOT, Report, Scenario, common, numbers, say
from benchmarks.servers.processes import figures, send, serving

PROMPT_WORDS: Final = 10
MOST_ANSWERS: Final = 1_000_000
FLAGS: Final[dict[str, Mapping[str, Any]]] = {
    **common("--rounds", "--accelerator"),
    "--levels": {"type": lambda text: text.split(","), "default": ["off", "expert"]},
    "--streams": {"type": numbers, "default": [1, 8]},
    "--seconds": {"type": float, "default": 100.0, "help": "of each level in each round"},
    "--tokens": {"type": int, "default": 500, "help": "of each answer"},
}


def measure(args: argparse.Namespace) -> Report:
    gaps: dict[tuple[str, int], list[float]] = defaultdict(list)
    cpu_s: dict[tuple[str, int], float] = defaultdict(float)
    longest: dict[tuple[str, int], list[float]] = defaultdict(list)
    with _servers(args) as servers:
        for number, streams, (level, server) in product(range(args.rounds), args.streams, servers.items()):
            before = _cpu_seconds(server)
            found = _load(server, streams, args, number)
            gaps[level, streams] += found
            cpu_s[level, streams] += _cpu_seconds(server) - before
            longest[level, streams].append(max(found))
            say(f"round {number + 1}, {streams} streams, {level}: longest gap {max(found):.1f} ms")
    rows = []
    for (level, streams), all_gaps in gaps.items():
        p50, p99, p999 = np.percentile(all_gaps, (50, 99, 99.9))
        row = {"telemetry": level, "streams": streams, "tokens": len(all_gaps), "p50_ms": p50, "p99_ms": p99}
        row |= {"p999_ms": p999, "longest_ms": longest[level, streams]}
        rows.append(row | {"cpu_ms_per_token": 1e3 * cpu_s[level, streams] / len(all_gaps)})
    return {"rows": rows}


@contextlib.contextmanager
def _servers(args: argparse.Namespace) -> Iterator[dict[str, ServerProcess]]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = {}
        for level in args.levels:
            flags = ["--accelerator", args.accelerator, "--max-num-seqs", str(max(args.streams))]
            if level != "off":
                flags += ["--telemetry-url", f"sqlite:///{folder / level}.db", "--telemetry", level]
            running[level] = stack.enter_context(serving(ROOT, flags, folder / f"{level}.log"))
        yield running


def _load(server: ServerProcess, streams: int, args: argparse.Namespace, number: int) -> list[float]:
    """Gaps in milliseconds between the tokens of answers, one after the other in each stream."""
    plan = LoadPlan(MOST_ANSWERS, max_concurrency=streams, duration_s=args.seconds, seed=number)
    run = send(server.url, plan, PromptShape(PROMPT_WORDS, args.tokens))
    figures(run)  # raises if an answer failed
    return [gap for sample in run.samples for gap in sample.answer.itls_ms]


def _cpu_seconds(server: ServerProcess) -> float:
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(report: Report) -> str:
    lines = [
        f"{'telemetry':<10}{'streams':>8}{'tokens':>9}  gap p50 · p99 · p99.9 · longest of each round, ms; CPU"
    ]
    for row in report["rows"]:
        longest = " ".join(f"{each:.1f}" for each in row["longest_ms"])
        lines.append(
            f"{row['telemetry']:<10}{row['streams']:>8}{row['tokens']:>9}  {row['p50_ms']:.2f} · {row['p99_ms']:.2f} · "
            f"{row['p999_ms']:.2f} · {longest}; {row['cpu_ms_per_token']:.3f} ms/token"
        )
    return "\n".join(lines)


SCENARIO: Final = Scenario(measure, show, FLAGS)
