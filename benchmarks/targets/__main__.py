"""Measures what the CPU half is meant to reach and says for each target whether it does.

    python -m benchmarks.targets --cache DIR [--llama-python PATH] [--kt-python PATH] [--json]

Run it on a machine with nothing else to do. --cache is where random models are written: up to 9 GB at a time, 17 GB for
the whole model, and all of it with --keep; without, what a check makes is deleted after it. --only and --skip choose
checks: llama, kernels, kt, batches, busy, python, load, packed, big. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.peers import kt_kernel, machine
from benchmarks.peers.engines import PeerError
from benchmarks.peers.report import DOCS, machine_line, without_directories, write_section
from benchmarks.peers.shapes import FULL_SHAPES
from benchmarks.targets import engine_checks, file_checks, layer_checks, packed_checks
from benchmarks.targets.lines import Line, Settings, at_least, markdown, not_measured, table

SECTION: Final = "targets"
PROGRAM: Final = "benchmarks.targets"
MAKER: Final = f"python -m {PROGRAM} --write-docs"

# How many times as fast as kt-kernel's best.
KT_TARGETS: Final = {"decode, 4 bit": 1.0, "decode, BF16": 1.0, "prefill of 512": 2.0}


def beside_kt_kernel(settings: Settings) -> list[Line]:
    """One layer, one thread, in turn with kt-kernel's ways."""
    flags = ["--kt-python", settings.kt_python, "--twofold-python", settings.python]
    flags += [
        "--shape",
        settings.shape.name,
        "--turns",
        str(2 * settings.rounds),
        "--seed",
        str(settings.seed),
    ]
    try:
        report = kt_kernel.measure(kt_kernel.parse(flags))
    except PeerError as error:
        return [not_measured("kt", "one layer, one thread, beside kt-kernel", str(error))]
    settings.say(kt_kernel.table(report))
    found = {c["test"]: c for c in report["comparisons"]}
    lines = []
    for test, wanted in KT_TARGETS.items():
        name = f"{test}, one layer, one thread, ÷ kt-kernel"
        c = found.get(test)
        if c is None:
            lines.append(not_measured("kt", name, "; ".join(report["missing"].values()) or "no figures"))
            continue
        note = f"{c['twofold']} {c['twofold_ms']:.2f} ms against {c['kt_kernel']} {c['kt_kernel_ms']:.2f} ms"
        lines.append(at_least("kt", name, wanted, c["times_faster"], "×", note))
    return lines


CHECKS: Final[dict[str, Callable[[Settings], list[Line]]]] = {
    "llama": engine_checks.beside_llama,
    "kernels": layer_checks.shares_of_the_ceilings,
    "kt": beside_kt_kernel,
    "batches": layer_checks.small_batches,
    "busy": engine_checks.beside_busy_processes,
    "python": engine_checks.python_share,
    "load": file_checks.load_time,
    "packed": packed_checks.packed_model,
    "big": file_checks.big_model,
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cache", type=Path, help="directory for the random models; needed to measure")
    parser.add_argument("--keep", action="store_true", help="keep the models that this run makes")
    parser.add_argument("--only", action="append", choices=CHECKS, help="again for more (default: all)")
    parser.add_argument("--skip", action="append", choices=CHECKS, default=[])
    parser.add_argument("--shape", choices=FULL_SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--format", action="append", help="again for more (default: q8_0 q4_0 bf16)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of whole engines (default: 5)")
    parser.add_argument(
        "--threads", type=int, default=machine.physical_cores(), help="default: physical cores"
    )
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--llama-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--kt-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--twofold-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write that object to a file")
    parser.add_argument(
        "--from-report", type=Path, metavar="FILE", help="measure nothing; show what --report wrote"
    )
    parser.add_argument("--write-docs", action="store_true", help="put the table into the performance page")
    args = parser.parse_args(arguments)
    if args.from_report is None and args.cache is None:
        parser.error("--cache DIR is needed: where the random models are written")
    if args.rounds < 1 or args.threads < 1 or not 1 <= args.layers <= FULL_SHAPES[args.shape].layers:
        parser.error("--rounds, --threads and --layers take 1 or more, and no more layers than the shape has")
    return args


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every check asked for, one after the other; one that fails is a line that says why."""
    settings = Settings(
        cache=args.cache,
        shape=FULL_SHAPES[args.shape].with_layers(args.layers),
        formats=tuple(dict.fromkeys(args.format or ("q8_0", "q4_0", "bf16"))),
        threads=args.threads,
        rounds=args.rounds,
        python=args.twofold_python,
        llama_python=args.llama_python,
        kt_python=args.kt_python,
        keep_models=args.keep,
        prompt_tokens=args.prompt_tokens,
        say=say,
    )
    report: dict[str, Any] = {
        "date": machine.today(),
        "command": machine.command_line(PROGRAM),
        "machine": machine.describe(),
    }
    lines: list[Line] = []
    for name, check in CHECKS.items():
        if name in args.skip or (args.only and name not in args.only):
            continue
        say(f"{name} ...")
        begun = time.perf_counter()
        try:
            lines += check(settings)
        except (PeerError, OSError, ValueError, ImportError) as error:
            lines.append(not_measured(name, name, str(error)))
        say(f"{name}: {time.perf_counter() - begun:.0f} s")
    return {**report, "lines": [dataclasses.asdict(line) for line in lines]}


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        if args.from_report:
            report = json.loads(args.from_report.read_text(encoding="utf-8"))
        else:
            report = measure(args)
        if args.report is not None:
            args.report.write_text(json.dumps(report, indent=1), encoding="utf-8")
        if args.write_docs:
            body = f"{machine_line(report)}\n\n{without_directories(markdown(report['lines']))}"
            write_section(DOCS, SECTION, MAKER, body)
    except (OSError, ValueError, KeyError) as error:
        say(f"{PROGRAM}: {error}")
        return 2
    lines = [Line(**line) for line in report["lines"]]
    print(json.dumps(report, indent=1) if args.json else table(lines))
    return 1 if any(line.verdict == "short" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
