"""One MoE layer of a real shape, Twofold and kt-kernel's raw extension in turn: decoding one token, prefilling 512.

    python -m benchmarks.peers.kt_kernel --kt-python PATH [--threads 1] [--turns 10] [--json]

PATH is an interpreter with kt-kernel 0.7.2 and torch (`pip install --no-deps kt-kernel==0.7.2` in an environment that
has torch). Its KTMoEWrapper asks for a GPU, so its compiled module is loaded alone. Each way is a process that stays;
the one whose turn it is runs, the others are stopped by a signal, because kt-kernel's dispatcher waits by spinning.
Every pass routes its tokens anew, so a decoded token finds its experts in memory and not in a cache. Weights are
random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.peers import machine
from benchmarks.peers.engines import PeerError
from benchmarks.peers.layers import LayerSpec, Timing, running, take_turns
from benchmarks.peers.report import DOCS, machine_line, without_directories, write_section
from benchmarks.peers.rounds import quartiles
from benchmarks.peers.shapes import FULL_SHAPES, FullShape

SECTION: Final = "kt-kernel"
PROGRAM: Final = "benchmarks.peers.kt_kernel"
MAKER: Final = f"python -m {PROGRAM} --write-docs"
OUR_FORMATS: Final = ("q4_0", "q4_k", "int4", "q8_0", "int8_channel", "int4_channel", "bf16")
THEIR_METHODS: Final = ("raw-int4", "raw-int4-avxvnni", "q4_k", "int8", "bf16-avx2", "bf16-avx512")
PREFILL: Final = 512
OURS: Final = "layer_worker.py"
THEIRS: Final = "kt_worker.py"

CHANNELS: Final = ("8 bit with one scale for a row", "4 bit with one scale for a row")

# Who competes with whom in decoding: ways whose weights are as large. One scale for a row counts in prefill, too.
CLASSES: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "4 bit": (
        ("q4_0", "q4_k", "int4"),
        ("raw-int4", "raw-int4-avxvnni", "raw-int4-avx2", "q4_k", "q4_0", "int4"),
    ),
    CHANNELS[0]: (("int8_channel",), ("int8",)),
    CHANNELS[1]: (("int4_channel",), ("int4",)),
    "BF16": (("bf16",), ("bf16-avx2", "bf16-avx512")),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--kt-python", default=sys.executable, metavar="PATH", help="interpreter with kt-kernel and torch"
    )
    parser.add_argument("--twofold-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--shape", choices=FULL_SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--format", action="append", help=f"of ours (default: {' '.join(OUR_FORMATS)})")
    parser.add_argument(
        "--method", action="append", help=f"of kt-kernel's (default: {' '.join(THEIR_METHODS)})"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=10, help="of every way (default: 10)")
    parser.add_argument("--passes", type=int, default=20, help="of one token within a turn; of 512 tokens: 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--write-docs", action="store_true", help="put the table into the performance page")
    args = parser.parse_args(arguments)
    for name in ("threads", "turns", "passes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} was given {getattr(args, name)}; it takes 1 or more")
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything in turn. PeerError if neither side could be started."""
    shape = FULL_SHAPES[args.shape]
    specs = [LayerSpec(OURS, way, args.twofold_python) for way in args.format or OUR_FORMATS]
    specs += [LayerSpec(THEIRS, way, args.kt_python) for way in args.method or THEIR_METHODS]
    found = {"date": machine.today(), "command": machine.command_line(PROGRAM), "machine": machine.describe()}
    cases = [(1, args.passes), (PREFILL, 1)]
    with running(specs, shape, args.threads, PREFILL, args.seed) as (processes, missing):
        if not processes:
            raise PeerError("; ".join(missing.values()))
        for process in processes:
            print(f"{process.spec.name} is ready", file=sys.stderr, flush=True)
        timings = take_turns(processes, cases, args.turns, missing)
    rows = [row_of(spec, timing, shape) for spec in specs for timing in timings_of(timings, spec)]
    return {
        **found, "shape": args.shape, "threads": args.threads, "rows": rows, "missing": missing,
        "comparisons": compare(rows),
    }  # fmt: skip


def timings_of(timings: Mapping[tuple[str, int], Timing], spec: LayerSpec) -> list[Timing]:
    return [timing for (name, _), timing in timings.items() if name == spec.name]


def row_of(spec: LayerSpec, timing: Timing, shape: FullShape) -> dict[str, Any]:
    """One way with so many tokens. Work counts two operations per weight and token."""
    median = statistics.median(timing.seconds)
    low, high = quartiles(timing.seconds)
    operations = 2 * timing.tokens * shape.top_k * shape.expert_weights
    return {
        "engine": "twofold" if spec.worker == OURS else "kt-kernel",
        "way": spec.way,
        "tokens": timing.tokens,
        "ms": 1e3 * median,
        "quartiles_ms": [1e3 * low, 1e3 * high],
        "best_ms": 1e3 * min(timing.seconds),
        "gflop_per_s": operations / median / 1e9,
        "passes": len(timing.seconds),
    }


def compare(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Our fastest against theirs: decoding by size of the weights, prefill over all ways. By medians."""
    found = []
    for name, (ours, theirs) in CLASSES.items():
        mine, peer = fastest(rows, "twofold", 1, ours), fastest(rows, "kt-kernel", 1, theirs)
        found.append(comparison(f"decode, {name}", mine, peer))
        if name in CHANNELS:
            mine, peer = fastest(rows, "twofold", PREFILL, ours), fastest(rows, "kt-kernel", PREFILL, theirs)
            found.append(comparison(f"prefill of {PREFILL}, {name}", mine, peer))
    found.append(
        comparison(
            f"prefill of {PREFILL}",
            fastest(rows, "twofold", PREFILL, None),
            fastest(rows, "kt-kernel", PREFILL, None),
        )
    )
    return [row for row in found if row]


def fastest(
    rows: Sequence[Mapping[str, Any]], engine: str, tokens: int, ways: Sequence[str] | None
) -> Mapping[str, Any] | None:
    mine = [
        row
        for row in rows
        if row["engine"] == engine and row["tokens"] == tokens and (ways is None or row["way"] in ways)
    ]
    return min(mine, key=lambda row: float(row["ms"]), default=None)


def comparison(test: str, mine: Mapping[str, Any] | None, peer: Mapping[str, Any] | None) -> dict[str, Any]:
    if mine is None or peer is None:
        return {}
    return {
        "test": test,
        "twofold": mine["way"],
        "twofold_ms": mine["ms"],
        "kt_kernel": peer["way"],
        "kt_kernel_ms": peer["ms"],
        "times_faster": peer["ms"] / mine["ms"],
    }


def table(report: Mapping[str, Any]) -> str:
    lines = [f"{'engine':<11}{'way':<18}{'tokens':>7}{'ms':>9}{'quartiles':>18}{'best':>9}{'GFLOP/s':>9}"]
    for row in report["rows"]:
        low, high = row["quartiles_ms"]
        lines.append(
            f"{row['engine']:<11}{row['way']:<18}{row['tokens']:>7}{row['ms']:>9.2f}{f'{low:.2f} - {high:.2f}':>18}"
            f"{row['best_ms']:>9.2f}{row['gflop_per_s']:>9.1f}"
        )
    lines += [
        f"{c['test']}: {c['twofold']} {c['twofold_ms']:.2f} ms, kt-kernel {c['kt_kernel']} {c['kt_kernel_ms']:.2f} ms: "
        f"{c['times_faster']:.2f}x as fast"
        for c in report["comparisons"]
    ]
    lines += [f"without {name}: {why}" for name, why in report["missing"].items()]
    return "\n".join(lines)


def markdown(report: Mapping[str, Any]) -> str:
    """A row per way: decode and prefill beside each other."""
    lines = [
        machine_line(report),
        "",
        "| engine | weights | 1 token, ms | 512 tokens, ms | 512 tokens, GFLOP/s |",
        "|---|---|---|---|---|",
    ]
    ways = list(dict.fromkeys((row["engine"], row["way"]) for row in report["rows"]))
    by_case = {(row["engine"], row["way"], row["tokens"]): row for row in report["rows"]}

    def cell(row: Mapping[str, Any] | None) -> str:
        return f"{row['ms']:.2f} ({row['quartiles_ms'][0]:.2f}–{row['quartiles_ms'][1]:.2f})" if row else "-"

    for engine, way in ways:
        one, many = by_case.get((engine, way, 1)), by_case.get((engine, way, PREFILL))
        rate = f"{many['gflop_per_s']:.0f}" if many else "-"
        lines.append(f"| {engine} | {way} | {cell(one)} | {cell(many)} | {rate} |")
    lines.append("")
    lines += [
        f"- {c['test']}: {c['twofold']} is {c['times_faster']:.2f}× as fast as kt-kernel's best ({c['kt_kernel']})."
        for c in report["comparisons"]
    ]
    lines += [f"- Without {name}: {without_directories(why)}." for name, why in report["missing"].items()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        report = measure(args)
        if args.write_docs:
            write_section(DOCS, SECTION, MAKER, markdown(report))
    except (PeerError, OSError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report) if args.json else markdown(report) if args.markdown else table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
