"""Measures what the CPU half is meant to reach and says for each target whether it does.

    python -m benchmarks targets --cache DIR [--llama-python PATH] [--json]

Run it on a machine with nothing else to do. --cache is where random models are written: up to 9 GB at a time, 17 GB for
the whole model, and all of it with --keep; without, what a check makes is deleted after it. --only and --skip choose
checks: llama, kernels (shares of the ceilings that one MoE layer reaches; `make bench` shows them kernel by kernel),
batches (a few tokens through that layer), busy, python, load, packed, big. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from benchmarks.models.shapes import FULL_SHAPES
from benchmarks.scenario import (
    BenchmarkError,
    Report,
    Scenario,
    check_model_flags,
    common,
    say,
    without_directories,
)
from benchmarks.targets import engine_checks, file_checks, layer_checks
from benchmarks.targets.lines import Line, Settings, markdown, not_measured

CHECKS: Final[dict[str, Callable[[Settings], list[Line]]]] = {
    "llama": engine_checks.beside_llama,
    "kernels": layer_checks.shares_of_the_ceilings,
    "batches": layer_checks.small_batches,
    "busy": engine_checks.beside_busy_processes,
    "python": engine_checks.python_share,
    "load": file_checks.load_time,
    "packed": file_checks.packed_model,
    "big": file_checks.big_model,
}
FLAGS: Final[dict[str, Mapping[str, Any]]] = {
    **common("--cache", "--shape", "--layers", "--rounds", "--threads", "--prompt-tokens"),
    **common("--llama-python", "--twofold-python"),
    "--keep": {"action": "store_true", "help": "keep the models that this run makes"},
    "--only": {"action": "append", "choices": CHECKS, "help": "again for more (default: all)"},
    "--skip": {"action": "append", "choices": CHECKS, "default": []},
    "--format": {"action": "append", "help": "again for more (default: q8_0 q4_0 bf16)"},
}


def measure(args: argparse.Namespace) -> Report:
    """Every check asked for, one after the other; one that fails is a line that says why."""
    settings = Settings(
        cache=args.cache,
        shape=FULL_SHAPES[args.shape].with_layers(args.layers),
        formats=tuple(dict.fromkeys(args.format or ("q8_0", "q4_0", "bf16"))),
        threads=args.threads,
        rounds=args.rounds,
        python=args.twofold_python,
        llama_python=args.llama_python,
        keep_models=args.keep,
        prompt_tokens=args.prompt_tokens,
    )
    lines: list[Line] = []
    for name, check in CHECKS.items():
        if name in args.skip or (args.only and name not in args.only):
            continue
        say(f"{name} ...")
        begun = time.perf_counter()
        try:
            lines += check(settings)
        except (BenchmarkError, OSError, ValueError, ImportError) as error:
            lines.append(not_measured(name, name, str(error)))
        say(f"{name}: {time.perf_counter() - begun:.0f} s")
    return {"lines": [dataclasses.asdict(line) for line in lines]}


SCENARIO: Final = Scenario(
    measure,
    lambda report: markdown(report["lines"]),
    FLAGS,
    check_model_flags,
    lambda report: without_directories(markdown(report["lines"])),
    lambda report: any(line["verdict"] == "short" for line in report["lines"]),
)
