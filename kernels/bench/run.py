"""Micro-benchmark of the CPU kernels: GB/s and GFLOP/s beside the ceilings of this machine, measured in the same run.

    python kernels/bench/run.py [--level avx512] [--dtype bfloat16] [--threads 2] [--json]

One expert of Qwen3-30B-A3B's shape by default (hidden 2048, intermediate 768): gate_up followed by the down product,
on enough experts to overflow every cache, with 1, 2, ... tokens for each. Cases take turns, one expert at a time, each
turn on weights that no cache still holds, so that a busy neighbour hits all of them; "best" is the fastest turn,
"quarter" the lower quartile. With several threads each has experts of its own and a turn lasts as long as the slowest.
A share of the read ceiling near 1 means that a kernel waits for memory and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

try:
    from twofold import ops
    from twofold._core import kernels
except ImportError:  # run from a checkout whose native module was built in place
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "engine"))
    from twofold import ops
    from twofold._core import kernels


@dataclass(frozen=True)
class Row:
    """One line of the table. Bandwidth counts weight bytes, work counts two operations per weight and token."""

    kernel: str
    level: str
    dtype: str
    tokens: int
    threads: int
    ms: float
    quarter_ms: float
    gb_per_s: float
    share_of_read: float
    gflop_per_s: float


@dataclass(frozen=True)
class Case:
    """What one turn does: reads an expert, or runs it for some tokens."""

    kernel: str
    level: str
    tokens: int


class Experts:
    """One thread's experts, inputs and outputs."""

    def __init__(
        self, hidden: int, intermediate: int, count: int, dtype: str, max_tokens: int, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        element = np.float32 if dtype == "float32" else np.uint16

        def matrix(rows: int, columns: int) -> NDArray:
            w = rng.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
            return w if dtype == "float32" else (w.view(np.uint32) >> 16).astype(element)

        first = (matrix(intermediate, hidden), matrix(intermediate, hidden), matrix(hidden, intermediate))
        self.weights = [tuple(w.copy() for w in first) for _ in range(count)]
        self.x = rng.standard_normal((max_tokens, hidden), np.float32)
        self.h = np.empty((max_tokens, intermediate), np.float32)
        self.y = np.empty((max_tokens, hidden), np.float32)
        self.bytes = sum(w.nbytes for w in first)
        self.elements = sum(w.size for w in first)

    def run(self, case: Case, turn: int) -> None:
        gate, up, down = self.weights[turn % len(self.weights)]
        if case.kernel == "read":
            for w in (gate, up, down):
                kernels.read_all(w, level=case.level)
            return
        x, h, y = self.x[: case.tokens], self.h[: case.tokens], self.y[: case.tokens]
        kernels.gate_up(x, gate, up, h, level=case.level)
        kernels.matmul(h, down, y, level=case.level)


def take_turns(teams: list[Experts], cases: list[Case], passes: int) -> dict[Case, list[float]]:
    """Seconds of every turn of every case, ascending. One thread per entry of `teams`; the kernels release the GIL."""
    num_turns = passes * len(cases)
    took = np.zeros((len(teams), num_turns))
    together = threading.Barrier(len(teams))

    def work(index: int) -> None:
        for turn in range(num_turns):
            together.wait()
            start = time.perf_counter()
            teams[index].run(cases[turn % len(cases)], turn)
            took[index, turn] = time.perf_counter() - start

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(teams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slowest = took.max(axis=0)
    return {case: sorted(slowest[i :: len(cases)]) for i, case in enumerate(cases)}


def measure(args: argparse.Namespace, dtype: str, levels: list[str]) -> list[Row]:
    """All levels and token counts for one element type."""
    per_expert = 3 * args.hidden * args.intermediate * (4 if dtype == "float32" else 2)
    count = max(2, args.megabytes * 2**20 // per_expert // args.threads)
    most = max(args.tokens)
    teams = [
        Experts(args.hidden, args.intermediate, count, dtype, most, seed) for seed in range(args.threads)
    ]
    cases = [Case("read", levels[-1], 0)]
    cases += [
        Case("expert", level, tokens)
        for tokens in args.tokens
        for level in levels
        if level != "generic" or tokens <= args.generic_tokens
    ]
    turns = take_turns(teams, cases, args.passes)
    size, elements = sum(t.bytes for t in teams), sum(t.elements for t in teams)
    read = turns[cases[0]][0]
    return [
        Row(
            case.kernel, case.level, dtype, case.tokens, args.threads, 1e3 * s[0], 1e3 * s[len(s) // 4],
            size / s[0] / 1e9, read / s[0], 2 * elements * case.tokens / s[0] / 1e9,
        )
        for case, s in turns.items()
    ]  # fmt: skip


def fork_join_us(threads: int) -> float:
    """Time of an empty parallel loop on a team that is awake."""
    team = ops.ThreadTeam(threads)
    repeats = 20_000
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        kernels.count_chunks(team, 2 * threads, repeats=repeats)
        best = min(best, time.perf_counter() - start)
    return best / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", action="append", choices=kernels.supported_levels(), help="default: all")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"], help="default: both")
    parser.add_argument("--threads", type=int, default=ops.ThreadTeam(0).num_threads)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 32, 128])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument(
        "--megabytes", type=int, default=256, help="weights in all; must overflow the last cache"
    )
    parser.add_argument("--passes", type=int, default=15, help="turns of each case")
    parser.add_argument(
        "--generic-tokens", type=int, default=2, help="the scalar level is slow: no more than this"
    )
    parser.add_argument("--json", action="store_true", help="a list of rows instead of the table")
    args = parser.parse_args()
    levels = args.level or kernels.supported_levels()
    rows = [row for dtype in args.dtype or ["float32", "bfloat16"] for row in measure(args, dtype, levels)]
    fork_join = fork_join_us(args.threads)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "fork_join_us": fork_join}, indent=1))
        return
    names = (
        "kernel",
        "level",
        "dtype",
        "tokens",
        "threads",
        "best ms",
        "quarter",
        "GB/s",
        "of read",
        "GFLOP/s",
    )
    print("{:8}{:13}{:10}{:>7}{:>8}{:>9}{:>9}{:>8}{:>9}{:>9}".format(*names))
    for r in rows:
        print(
            f"{r.kernel:8}{r.level:13}{r.dtype:10}{r.tokens:7}{r.threads:8}{r.ms:9.3f}{r.quarter_ms:9.3f}{r.gb_per_s:8.1f}"
            f"{r.share_of_read:9.2f}{r.gflop_per_s:9.1f}"
        )
    print(f"fork-join of {args.threads} threads, awake: {fork_join:.2f} us")


if __name__ == "__main__":
    main()
