"""Micro-benchmark of the CPU kernels: GB/s and 10^9 operations/s beside the ceilings measured in the same run.

    python kernels/bench/run.py [--format q8_0] [--level avx512_vnni] [--threads 2] [--tokens 1 32] [--json]
    python kernels/bench/run.py --curve --threads 1 [--hidden 512 --intermediate 256 --megabytes 0]

One expert of Qwen3-30B-A3B's shape by default (hidden 2048, intermediate 768) as the engine runs it: activations
encoded, gate and up, SiLU, down; on enough experts to overflow every cache, with 1, 2, ... tokens for each. Cases take
turns, one expert at a time, each turn on weights that no cache still holds, so that a busy neighbour hits all of them;
"best" is the fastest turn, "quarter" the lower quartile. With several threads each has experts of its own and a turn
lasts as long as the slowest. "of read": the share of the bandwidth of a plain read of the same memory; near 1 a kernel
waits for memory and nothing else. "of peak": the share of what products in registers alone reach with the level's own
instructions (f32, bf16 or int8, as the kernel multiplies, in tiles at level amx). "x one": the lower quartile as a
multiple of one token's at the same level, the cost of a step that verifies drafts; --curve prints these alone, a line
per format and level. One thread's times are CPU time, which neighbours disturb less. Only kernels of a level's own are
run; what a level takes from the one below is in that one's lines.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import ceilings
import numpy as np
from numpy.typing import NDArray

try:
    from twofold._core import weight_formats
    from twofold._testing import kernels
    from twofold.blocks import ops
except ImportError:  # run from a checkout whose native module was built in place
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "engine"))
    from twofold._core import weight_formats
    from twofold._testing import kernels
    from twofold.blocks import ops

FORMATS = weight_formats()
PEAK_OF = {"f32": "f32", "bf16": "bf16", "q8": "int8", "q8_token": "int8"}
"""The arithmetic ceiling of a kernel, by the kind of its activations."""


@dataclass(frozen=True)
class Row:
    """One line of the table. Bandwidth counts packed weight bytes, work counts two operations per weight and token."""

    kernel: str
    level: str
    format: str
    tokens: int
    threads: int
    ms: float
    quarter_ms: float
    gb_per_s: float
    share_of_read: float
    gop_per_s: float
    share_of_peak: float | None
    times_one_token: float | None


@dataclass(frozen=True)
class Case:
    """What one turn does: reads an expert, or runs it for some tokens."""

    kernel: str
    level: str
    tokens: int


def source_rows(rng: np.random.Generator, format_name: str, rows: int, columns: int) -> NDArray[np.uint8]:
    """Random weights of size 1 / sqrt(columns) in a format."""
    w = rng.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
    if format_name == "fp8":
        codes = rng.integers(0, 256, (rows, columns), np.uint8)
        return np.where(codes & 0x7F == 0x7F, np.uint8(0), codes)
    block_columns, block_bytes, *_, quantised = FORMATS[format_name]
    if format_name == "nvfp4":
        blocks = rng.integers(0, 127, (rows, columns // block_columns * block_bytes), np.uint8)
        heads = np.full((rows, 1), 1e-3 / columns**0.5, np.float32).view(np.uint8)
        return np.hstack([heads, blocks])
    if quantised:
        return np.asarray(ops.quantise_rows(ops.ThreadPool(1), w, format_name))
    blocks = rng.integers(0, 256, (rows * columns // block_columns, block_bytes), np.uint8)
    kernels.put_scales(blocks, format_name, np.full((len(blocks), 2), 1e-3, np.float16).view(np.uint16))
    return blocks.reshape(rows, -1)


class Experts:
    """One thread's experts, inputs and outputs."""

    def __init__(
        self, hidden: int, intermediate: int, count: int, format_name: str, most: int, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        self.format, self.intermediate = format_name, intermediate

        def packed(rows: int, columns: int) -> NDArray[np.uint8]:
            blocks = (-(-rows // 128), -(-columns // 128))
            scales = np.full(blocks, 1e-4, np.float32) if format_name == "fp8" else None
            return np.asarray(
                kernels.pack(source_rows(rng, format_name, rows, columns), format_name, columns, scales)
            )

        first = (packed(intermediate, hidden), packed(intermediate, hidden), packed(hidden, intermediate))
        self.weights = [first, *(tuple(aligned_copy(w) for w in first) for _ in range(count - 1))]
        self.x = rng.standard_normal((most, hidden), np.float32)
        self.y = np.empty((most, hidden), np.float32)
        self.bytes = sum(w.nbytes for w in first)
        self.elements = 3 * hidden * intermediate

    def run(self, case: Case, turn: int) -> None:
        gate, up, down = self.weights[turn % len(self.weights)]
        if case.kernel == "read":
            for w in (gate, up, down):
                kernels.read_all(w, level=case.level)
            return
        x, y = self.x[: case.tokens], self.y[: case.tokens]
        kernels.expert(x, gate, up, down, self.format, self.intermediate, y, level=case.level)


def aligned_copy(w: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A copy that begins on a cache line, as packed weights do."""
    memory = np.empty(w.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    copy = memory[begin : begin + w.nbytes].reshape(w.shape)
    copy[:] = w
    return copy


def interleave(pools: list[Experts], cases: list[Case], passes: int) -> dict[Case, list[float]]:
    """Seconds of every turn of every case, ascending. One thread per entry of `pools`; the kernels release the GIL."""
    num_turns = passes * len(cases)
    took = np.zeros((len(pools), num_turns))
    together = threading.Barrier(len(pools))
    clock = time.perf_counter if len(pools) > 1 else time.thread_time

    def work(index: int) -> None:
        for turn in range(num_turns):
            together.wait()
            start = clock()
            pools[index].run(cases[turn % len(cases)], turn)
            took[index, turn] = clock() - start

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(pools))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slowest = took.max(axis=0)
    return {case: sorted(slowest[i :: len(cases)]) for i, case in enumerate(cases)}


def measure(
    args: argparse.Namespace, format_name: str, levels: list[str], peaks: dict[str, dict[str, float]]
) -> list[Row]:
    """All levels with a kernel of their own and all token counts for one format."""
    own = [level for level in levels if kernels.format_kernel(level, format_name)[1] == level]
    if not own:
        return []
    columns, panel_bytes = FORMATS[format_name][2:4]
    per_expert = 3 * args.hidden * args.intermediate * panel_bytes // (32 * columns)
    count = max(2, args.megabytes * 2**20 // per_expert // args.threads)
    pools = [
        Experts(args.hidden, args.intermediate, count, format_name, max(args.tokens), seed)
        for seed in range(args.threads)
    ]
    cases = [Case("read", levels[-1], 0)]
    cases += [
        Case("expert", level, tokens)
        for tokens in args.tokens
        for level in own
        if level != "generic" or tokens <= args.generic_tokens
    ]
    turns = interleave(pools, cases, args.passes)
    size, elements = sum(t.bytes for t in pools), sum(t.elements for t in pools)
    read = turns[cases[0]][0]
    rows = []
    for case, s in turns.items():
        one = turns.get(Case(case.kernel, case.level, 1)) if case.tokens else None
        gop = 2 * elements * case.tokens / s[0] / 1e9
        kind = PEAK_OF[kernels.format_kernel(case.level, format_name)[0]] + "_tiles" * (case.level == "amx")
        peak = peaks[case.level].get(f"{kind}_gop_per_s")
        rows.append(
            Row(
                case.kernel, case.level, format_name, case.tokens, args.threads, 1e3 * s[0], 1e3 * s[len(s) // 4],
                size / s[0] / 1e9, read / s[0], gop, gop / peak if peak and case.tokens else None,
                s[len(s) // 4] / one[len(one) // 4] if one else None,
            )
        )  # fmt: skip
    return rows


def print_table(rows: list[Row], peaks: dict[str, dict[str, float]], threads: int) -> None:
    names = (
        "kernel",
        "level",
        "format",
        "tokens",
        "threads",
        "best ms",
        "quarter",
        "GB/s",
        "of read",
        "Gop/s",
        "of peak",
        "x one",
    )
    print("{:8}{:13}{:8}{:>7}{:>8}{:>9}{:>9}{:>8}{:>9}{:>9}{:>9}{:>7}".format(*names))
    for r in rows:
        of_peak = " " * 9 if r.share_of_peak is None else f"{r.share_of_peak:9.2f}"
        times_one = "" if r.times_one_token is None else f"{r.times_one_token:7.2f}"
        print(
            f"{r.kernel:8}{r.level:13}{r.format:8}{r.tokens:7}{r.threads:8}{r.ms:9.3f}{r.quarter_ms:9.3f}"
            f"{r.gb_per_s:8.1f}{r.share_of_read:9.2f}{r.gop_per_s:9.1f}{of_peak}{times_one}"
        )
    for level, found in peaks.items():
        print(
            f"{level}, {threads} threads: "
            + ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        )


def print_curve(rows: list[Row]) -> None:
    """Time as a multiple of one token's, a column per number of tokens."""
    tokens = sorted({r.tokens for r in rows if r.tokens})
    print("| | one token, GB/s | " + " | ".join(f"{count}" for count in tokens) + " |")
    print("|" + "---|" * (len(tokens) + 2))
    for format_name, level in sorted({(r.format, r.level) for r in rows if r.tokens}):
        own = {r.tokens: r for r in rows if r.tokens and (r.format, r.level) == (format_name, level)}
        times = [f"{own[count].times_one_token:.2f}" if count in own else "" for count in tokens]
        print(f"| {format_name}, {level} | {own[1].gb_per_s:.1f} | " + " | ".join(times) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", action="append", choices=kernels.supported_levels(), help="default: all")
    parser.add_argument("--format", action="append", choices=list(FORMATS), help="default: all")
    parser.add_argument("--threads", type=int, default=ops.ThreadPool(0).num_threads)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8, 32, 128])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument(
        "--megabytes", type=int, default=256, help="weights in all; must overflow the last cache"
    )
    parser.add_argument("--passes", type=int, default=15, help="turns of each case")
    parser.add_argument(
        "--generic-tokens", type=int, default=0, help="the scalar level is slow: no more than this"
    )
    parser.add_argument(
        "--curve", action="store_true", help="only times as multiples of one token's, 1 to 8 tokens"
    )
    parser.add_argument("--json", action="store_true", help="one object instead of the table")
    args = parser.parse_args()
    if args.curve:
        args.tokens = list(range(1, 9))
    levels = args.level or kernels.supported_levels()
    peaks = {level: ceilings.measure(args.threads, level) for level in levels}
    rows = [row for name in args.format or FORMATS for row in measure(args, name, levels, peaks)]
    if args.curve:
        print_curve(rows)
    elif args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "ceilings": peaks}, indent=1))
    else:
        print_table(rows, peaks, args.threads)


if __name__ == "__main__":
    main()
