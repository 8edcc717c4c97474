"""Decode and prefill behind long contexts: Twofold and llama.cpp on one random model, in turn, by type of KV cache.

    python -m benchmarks.peers.long_context --cache DIR [--llama-python PATH] [--positions 2048 --positions 32768]

Each engine is one process that holds the model and is stopped by a signal while the other measures. Contexts are
filled with chunks of 512 tokens that see only themselves (a prefill of 32k positions takes minutes and is not what is
measured): every key and value is computed, at its own position, and all belong to one sequence afterwards. Behind
them, --new-tokens steps of one token and one chunk of --prompt-tokens are timed, which see everything. Engines take
turns for --rounds rounds at every length before they go on to the next. KV types are matched by their size: bf16 with
llama.cpp's f16, q8 with its q8_0, f32 with f32; fp8 has no match there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import machine
from benchmarks.peers.engines import PeerError
from benchmarks.peers.gguf_model import file_name, write_model
from benchmarks.peers.layers import LayerProcess
from benchmarks.peers.report import NOTEBOOK, machine_line, write_section
from benchmarks.peers.rounds import quartiles
from benchmarks.peers.shapes import FULL_SHAPES

PROGRAM: Final = "benchmarks.peers.long_context"
SECTION: Final = "long contexts"
MAKER: Final = f"python -m {PROGRAM} --write-docs"
KV_TYPES: Final = {
    "f32": ("float32", "f32"),
    "bf16": ("bfloat16", "f16"),
    "q8": ("q8", "q8_0"),
    "fp8": ("fp8", ""),
}
"""Name here: (Twofold's, llama.cpp's)."""
TESTS: Final = ("decode", "prefill")
_FILL_TIMEOUT_S: Final = 1800.0


@dataclass(frozen=True)
class EngineSpec:
    """A worker of one engine with one type of KV cache."""

    engine: str
    kv: str
    python: str
    levels: str = ""
    """TWOFOLD_ISA of ours, as --isa gave it."""

    @property
    def worker(self) -> str:
        return "long_context_worker.py" if self.engine == "twofold" else "long_context_llama_worker.py"

    @property
    def name(self) -> str:
        return f"{self.engine} {self.kv}" + (f" {self.levels}" if self.levels else "")

    def task(self, model: Path, args: argparse.Namespace) -> dict[str, Any]:
        return {
            "model": str(model),
            "kv": KV_TYPES[self.kv][self.engine != "twofold"],
            "threads": args.threads,
            "context": max(args.positions) + max(args.prompt_tokens, args.new_tokens) + 512,
            "isa": self.levels,
        }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=FULL_SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=6, help="of the shape's (default: 6)")
    parser.add_argument("--format", default="q4_0", help="of the weights (default: q4_0)")
    parser.add_argument("--kv", action="append", choices=KV_TYPES, help="again for more (default: all)")
    parser.add_argument(
        "--positions", action="append", type=int, help="again for more (default: 2048, 8192, 32768)"
    )
    parser.add_argument("--engine", action="append", choices=("twofold", "llama.cpp"), help="default: both")
    parser.add_argument("--cache", type=Path, required=True, help="directory for the model")
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of every engine at a length (default: 5)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=16, help="steps of one token in a turn (default: 16)"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=512,
        help="of the chunk that is prefilled; 0: none (default: 512)",
    )
    parser.add_argument(
        "--threads", type=int, default=machine.physical_cores(), help="default: physical cores"
    )
    parser.add_argument("--isa", default="", help="TWOFOLD_ISA of Twofold's process")
    parser.add_argument("--llama-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--twofold-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--json", action="store_true", help="print all samples as JSON")
    parser.add_argument("--write-docs", action="store_true", help="put the table into the performance page")
    args = parser.parse_args(arguments)
    for name in ("rounds", "new_tokens", "threads", "layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} was given {getattr(args, name)}; it takes 1 or more")
    args.positions = sorted(set(args.positions or (2048, 8192, 32_768)))
    for positions in args.positions:
        if positions < 512 or positions % 512:
            parser.error(f"--positions was given {positions}; it takes a multiple of 512")
    return args


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per KV type, length, test and engine: its samples in tokens/s. PeerError if none could be measured."""
    # Room for every length that is asked for, in the file's own words.
    shape = replace(
        FULL_SHAPES[args.shape].with_layers(args.layers), context=2 * max(args.positions) + args.prompt_tokens
    )
    model = args.cache / f"{shape.context}-{file_name(shape, args.format, 0)}"
    if not model.exists():
        write_model(model, shape, args.format)
    rows: list[dict[str, Any]] = []
    for kv in dict.fromkeys(args.kv or KV_TYPES):
        specs = [
            spec
            for spec in (
                EngineSpec("twofold", kv, args.twofold_python, args.isa),
                EngineSpec("llama.cpp", kv, args.llama_python),
            )
            if spec.engine in (args.engine or (spec.engine,))
            and (KV_TYPES[kv][1] or spec.engine == "twofold")
        ]
        rows += _measure_type(specs, model, args)
    if not rows:
        raise PeerError("no engine could be measured")
    return rows


def _measure_type(specs: list[EngineSpec], model: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    processes: list[LayerProcess] = []
    rows: list[dict[str, Any]] = []
    try:
        for spec in specs:
            try:
                processes.append(LayerProcess(spec, spec.task(model, args)))
            except PeerError as error:
                say(str(error))
        for positions in args.positions:
            for process in processes:
                process.order({"fill": positions}, _FILL_TIMEOUT_S)
                say(f"{process.spec.name}: {positions} positions are filled")
            samples = _samples(processes, args)
            for spec, test in product(specs, TESTS):
                found = samples.get((test, spec.name))
                if found is None:
                    continue
                say(f"{spec.name} {positions} {test}: {statistics.median(found):.1f} tokens/s")
                where = {"kv": spec.kv, "positions": positions, "test": test}
                rows.append({**where, "engine": spec.engine, "samples": found})
    finally:
        for process in processes:
            process.close()
    return rows


def _samples(processes: list[LayerProcess], args: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    """Tokens per second of each test and engine, in turns."""
    orders = {"decode": args.new_tokens, "prefill": args.prompt_tokens}
    samples: dict[tuple[str, str], list[float]] = {}
    for turn in range(args.rounds + 1):
        for (test, count), process in product(orders.items(), processes):
            if count and (test == "decode" or turn <= 3):
                took = process.order({test: count}, _FILL_TIMEOUT_S)["seconds"]
                if turn > 0:  # the first warms caches and threads
                    samples.setdefault((test, process.spec.name), []).append(count / took)
    return samples


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a row per KV type, length and test; medians and quartiles."""
    found = {(row["kv"], row["positions"], row["test"], row["engine"]): row["samples"] for row in rows}
    lines = ["| KV cache | behind | test | twofold | llama.cpp | ratio |", "|---|---|---|---|---|---|"]

    def cell(samples: list[float] | None) -> str:
        if samples is None:
            return "-"
        low, high = quartiles(samples)
        return f"{statistics.median(samples):.1f} ({low:.1f}–{high:.1f})"

    for kv, positions, test in dict.fromkeys((key[0], key[1], key[2]) for key in found):
        ours, theirs = (found.get((kv, positions, test, name)) for name in ("twofold", "llama.cpp"))
        ratio = "-"
        if ours and theirs:
            ratio = f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.2f}×"
        peer = KV_TYPES[kv][1]
        name = kv if peer in ("", kv) else f"{kv} : {peer}"
        lines.append(f"| {name} | {positions:,} | {test} | {cell(ours)} | {cell(theirs)} | {ratio} |")
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    described = machine.describe()
    try:
        rows = measure(args)
        report = {"date": machine.today(), "command": machine.command_line(PROGRAM), "machine": described}
        if args.write_docs:
            write_section(NOTEBOOK, SECTION, MAKER, f"{machine_line(report)}\n\n{table(rows)}")
    except (PeerError, OSError, ValueError) as error:
        say(f"{PROGRAM}: {error}")
        return 2
    print(json.dumps({**report, "rows": rows}, indent=1) if args.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
