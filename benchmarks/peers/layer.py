"""One MoE layer of a real shape, Twofold's formats and kt-kernel's methods in turn: one token, and a prompt of 512.

    python -m benchmarks layer --shape qwen3-30b-a3b --format q4_0 --method raw-int4 --kt-python PATH

PATH is an interpreter with kt-kernel 0.7.2, torch and numpy (`pip install --no-deps kt-kernel==0.7.2` in an environment
that has both). Its KTMoEWrapper asks for a GPU, so its compiled module is loaded alone. Each turn is a fresh process
that draws random weights, loads them, warms up and measures --passes passes of one token and one of 512. Every pass
routes its tokens differently, so a decoded token finds its experts in memory and not in a cache. Stop other work
before: kt-kernel's threads wait by spinning, and lose much to a busy machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from benchmarks.models.random_blocks import FORMATS
from benchmarks.models.shapes import FULL_SHAPES, FullShape
from benchmarks.peers.engines import OURS, WORKERS, json_lines, take_turns
from benchmarks.peers.workers.layer_worker import METHODS
from benchmarks.scenario import (
    BenchmarkError,
    Report,
    Scenario,
    common,
    markdown_table,
    median_cell,
    positive,
    without_directories,
)

KT: Final = "kt-kernel"
PREFILL: Final = 512
_MISSING: Final = {
    OURS: "install it: make build",
    KT: "install kt-kernel==0.7.2 beside torch, or name an interpreter that has both: --kt-python PATH",
}
_FORMATS: Final = ("q4_0", "q4_k", "int4", "q8_0", "int8_channel", "int4_channel", "bf16")
_INT4: Final = ("raw-int4", "raw-int4-avxvnni", "raw-int4-avx2", "q4_k", "int4")
TESTS: Final[Sequence[tuple[str, str, Collection[str], Collection[str]]]] = (
    ("decode, 4 bit", "decode_ms", ("q4_0", "q4_k", "int4"), _INT4),
    ("decode, 8 bit with one scale for a row", "decode_ms", ("int8_channel",), ("int8",)),
    ("decode, 4 bit with one scale for a row", "decode_ms", ("int4_channel",), ("int4",)),
    ("decode, BF16", "decode_ms", ("bf16",), ("bf16-avx2", "bf16-avx512")),
    (f"prefill of {PREFILL}, 8 bit with one scale for a row", "prefill_ms", ("int8_channel",), ("int8",)),
    (f"prefill of {PREFILL}, 4 bit with one scale for a row", "prefill_ms", ("int4_channel",), ("int4",)),
    (f"prefill of {PREFILL}", "prefill_ms", FORMATS, METHODS),
)
"""Comparisons: name, figure, and the formats and methods that compete. In decode, their weights have one size."""
FLAGS: Final[dict[str, Mapping[str, Any]]] = {
    **common("--shape", "--rounds", "--seed", "--twofold-python", "--kt-python"),
    "--format": {"action": "append", "choices": FORMATS, "help": f"again for more (default: {' '.join(_FORMATS)})"},
    "--method": {"action": "append", "choices": METHODS, "help": "of kt-kernel; again for more (default: all)"},
    "--threads": {"type": positive, "default": 1, "help": "default: 1"},
    "--passes": {"type": positive, "default": 20, "help": "of one token in a turn (default: 20)"},
}  # fmt: skip
Case = tuple[int, int, bool]
"""Tokens, timed passes, and whether every expert gets the same number of tokens."""


@dataclass(frozen=True)
class Timing:
    """Seconds of every pass of a case, and how many experts it touched."""

    tokens: int
    seconds: list[float]
    touched: list[int]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Layer:
    """A layer of one engine, with weights in a format of ours or of a method of kt-kernel's."""

    engine: str
    weights: str
    python: str
    shape: FullShape
    threads: int
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.engine} {self.weights}"

    def measure(self, cases: Sequence[Case]) -> list[Timing]:
        """Run one process. Raises BenchmarkError."""
        names = ("hidden", "intermediate", "experts", "top_k")
        task = {name: getattr(self.shape, name) for name in names} | {"engine": self.engine, "cases": cases}
        task |= {"weights": self.weights, "threads": self.threads, "seed": self.seed}
        command = [self.python, str(WORKERS / "layer_worker.py"), json.dumps(task)]
        lines = json_lines(command, f"a layer of {self.name}", _MISSING[self.engine])
        timings = [Timing(**line) for line in lines if isinstance(line, dict) and "seconds" in line]
        if len(timings) != len(cases):
            raise BenchmarkError(f"a layer of {self.name} printed no measurement")
        return timings


def shown(timings: Sequence[Timing]) -> str:
    return "ms by tokens " + ", ".join(f"{one.tokens}: {1e3 * one.median_s:.2f}" for one in timings)


def measure(args: argparse.Namespace) -> Report:
    """Everything in turn. BenchmarkError if nothing could be measured."""
    shape = FULL_SHAPES[args.shape]
    sides = (
        (OURS, args.format or _FORMATS, args.twofold_python),
        (KT, args.method or METHODS, args.kt_python),
    )
    layers = [
        Layer(engine, name, python, shape, args.threads, args.seed)
        for engine, names, python in sides
        for name in dict.fromkeys(names)
    ]
    cases = ((1, args.passes, False), (PREFILL, 1, False))
    ways = {layer.name: partial(layer.measure, cases) for layer in layers}
    rounds, left_out = take_turns(ways, args.rounds, "layer", shown)
    if not rounds:
        raise BenchmarkError(f"nothing could be measured. {'; '.join(left_out.values())}")
    rows = [
        {
            "engine": layer.engine,
            "weights": layer.weights,
            "decode_ms": [1e3 * one.median_s for one, _ in rounds[layer.name]],
            "prefill_ms": [1e3 * many.median_s for _, many in rounds[layer.name]],
        }
        for layer in layers
        if layer.name in rounds
    ]
    # Two operations per weight and token.
    gflop = 2 * PREFILL * shape.top_k * shape.expert_weights / 1e9
    run = {"shape": args.shape, "threads": args.threads, "rounds": args.rounds, "prefill_gflop": gflop}
    return {**run, "rows": rows, "left_out": left_out, "comparisons": compare(rows)}


def compare(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Our fastest and kt-kernel's in each test that both were measured in."""
    found = []
    for test, figure, formats, methods in TESTS:
        mine, peer = fastest(rows, OURS, formats, figure), fastest(rows, KT, methods, figure)
        if mine and peer:
            found.append({"test": test, OURS: mine[1], KT: peer[1], "times_faster": peer[0] / mine[0]})
    return found


def fastest(
    rows: Sequence[Mapping[str, Any]], engine: str, weights: Collection[str], figure: str
) -> tuple[float, str] | None:
    """The least median of these weights, and whose it is; None if none was measured."""
    mine = [row for row in rows if row["engine"] == engine and row["weights"] in weights]
    return min(((statistics.median(row[figure]), row["weights"]) for row in mine), default=None)


def markdown(report: Report) -> str:
    """A row per engine and kind of weights, then the fastest of both sides."""
    head = ["engine", "weights", "1 token, ms", f"{PREFILL} tokens, ms", f"{PREFILL} tokens, GFLOP/s"]
    rows = []
    for row in report["rows"]:
        times = [median_cell(row[key], 2) for key in ("decode_ms", "prefill_ms")]
        rate = 1e3 * report["prefill_gflop"] / statistics.median(row["prefill_ms"])
        rows.append([row["engine"], row["weights"], *times, f"{rate:.0f}"])
    lines = [
        f"- {c['test']}: {c[OURS]} is {c['times_faster']:.2f}× as fast as kt-kernel's best ({c[KT]})."
        for c in report["comparisons"]
    ]
    lines += [f"- Without {name}: {without_directories(why)}." for name, why in report["left_out"].items()]
    return "\n".join([markdown_table(head, rows), "", *lines])


SCENARIO: Final = Scenario(measure, markdown, FLAGS, markdown=markdown)
