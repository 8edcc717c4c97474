"""Twofold, llama.cpp and ik_llama.cpp on the same random model of a real shape, in turn.

    python -m benchmarks peers --shape qwen3-30b-a3b --layers 6 --format q8_0 --cache DIR [--llama-python PATH]

The model is written once per format to --cache as a GGUF file and kept there (delete it when you are done, or give
--delete). Each engine measures in its own process: a prompt of --prompt-tokens random tokens (pp), then --new-tokens
steps of one token after it (tg), both after --depth tokens of context, as llama-bench's -d. They take turns for
--rounds rounds; medians and ratios are shown. llama.cpp first tries flash attention, memory mapping and repacking on
and off and keeps what is fastest; ik_llama.cpp tries -fa, -rtr and -fmoe. Stop other work before: an engine that spins
at a barrier loses more to a busy machine than one that sleeps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from typing import Any, Final

from benchmarks.models.gguf_model import cached_model
from benchmarks.models.random_blocks import GGUF_FORMATS
from benchmarks.models.shapes import FULL_SHAPES
from benchmarks.peers.engines import ENGINES, OURS, TESTS, Outcome, Workload, alternate
from benchmarks.scenario import (
    BenchmarkError,
    Report,
    Scenario,
    check_model_flags,
    common,
    markdown_table,
    median_cell,
    positive,
    without_directories,
)

FLAGS: Final[dict[str, Mapping[str, Any]]] = {
    **common("--shape", "--layers", "--cache", "--rounds", "--threads", "--prompt-tokens", "--new-tokens", "--seed"),
    **common("--twofold-python", "--llama-python", "--ik-python"),
    "--format": {"action": "append", "choices": GGUF_FORMATS, "help": "again for more (default: q8_0)"},
    "--engine": {"action": "append", "choices": ENGINES, "help": "again for more (default: all)"},
    "--depth": {"type": positive, "default": 0, "help": "tokens of context before the prompt (default: 0)"},
    "--delete": {"action": "store_true", "help": "delete each model that this run made, after its rounds"},
    "--repeats": {"type": positive, "default": 3, "help": "within a turn; its median counts (default: 3)"},
}  # fmt: skip


def check(args: argparse.Namespace) -> None:
    check_model_flags(args)
    args.format = list(dict.fromkeys(args.format or ["q8_0"]))
    args.engine = [name for name in ENGINES if name in (args.engine or ENGINES)]


def measure(args: argparse.Namespace) -> Report:
    """Measures all formats in turn; BenchmarkError if no engine could be measured."""
    shape = FULL_SHAPES[args.shape].with_layers(args.layers)
    lengths = {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens, "depth": args.depth}
    work = Workload(**lengths, repeats=args.repeats, threads=args.threads, seed=args.seed, vocab=shape.vocab)
    engines = [ENGINES[name](args) for name in args.engine]
    outcomes: dict[str, Outcome] = {}
    for format_name in args.format:
        with cached_model(args.cache, shape, format_name, args.seed, keep=not args.delete) as model:
            outcomes[format_name] = alternate(engines, model, work, format_name, args.rounds)
    left_out = {name: outcome.left_out for name, outcome in outcomes.items() if outcome.left_out}
    rows = [row for name, outcome in outcomes.items() for row in rows_of(outcome, name, work)]
    if not rows:
        reasons = "; ".join(f"{engine}: {why}" for of in left_out.values() for engine, why in of.items())
        raise BenchmarkError(f"nothing could be measured. {reasons}")
    run = {"shape": args.shape, "layers": args.layers, "rounds": args.rounds}
    details = {
        name: {engine: rounds[-1].details for engine, rounds in outcome.rounds.items()}
        for name, outcome in outcomes.items()
    }
    return {**run, "rows": rows, "left_out": left_out, "details": details}


def rows_of(outcome: Outcome, format_name: str, work: Workload) -> list[dict[str, Any]]:
    """A row per engine and test. Ratios are to Twofold's median; null where Twofold was not measured."""
    rows = []
    after = f" @ d{work.depth}" if work.depth else ""
    for engine in outcome.rounds:
        for test in TESTS:
            samples, ours = outcome.samples(engine, test), outcome.samples(OURS, test)
            median = statistics.median(samples)
            rows.append(
                {
                    "engine": engine,
                    "format": format_name,
                    "test": f"{test}{work.prompt_tokens if test == 'pp' else work.new_tokens}{after}",
                    "tokens_per_s": median,
                    "ratio_to_twofold": median / statistics.median(ours) if ours else None,
                    "samples": samples,
                }
            )
    return rows


def markdown(report: Report) -> str:
    """A row per format and test, Twofold's speed as a multiple of each peer's."""
    found = {(row["engine"], row["format"], row["test"]): row for row in report["rows"]}
    engines = list(dict.fromkeys(row["engine"] for row in report["rows"]))
    peers = [name for name in engines if name != OURS]

    def times(peer: str, case: tuple[str, str]) -> str:
        mine, theirs = found.get((OURS, *case)), found.get((peer, *case))
        return f"{mine['tokens_per_s'] / theirs['tokens_per_s']:.2f}×" if mine and theirs else "-"

    rows = []
    for case in dict.fromkeys((row["format"], row["test"]) for row in report["rows"]):
        of_case = [found.get((engine, *case)) for engine in engines]
        speeds = [median_cell(row["samples"]) if row else "-" for row in of_case]
        rows.append([*case, *speeds, *(times(peer, case) for peer in peers)])
    lines = [markdown_table(["format", "test", *engines, *(f"{OURS} ÷ {p}" for p in peers)], rows)]
    return "\n".join([*lines, *map(without_directories, _left_out(report))])


def _left_out(report: Report) -> list[str]:
    return [
        f"Without {engine} in {format_name}: {why}."
        for format_name, reasons in report["left_out"].items()
        for engine, why in reasons.items()
    ]


SCENARIO: Final = Scenario(measure, markdown, FLAGS, check, markdown)
