"""Runs one benchmark: `python -m benchmarks NAME`, with --help for its flags; without a name, lists them.

Measure on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from twofold.api.errors import TwofoldError

from benchmarks.scenario import (
    PERFORMANCE,
    BenchmarkError,
    Entry,
    Report,
    Scenario,
    command_line,
    machine,
    machine_line,
    say,
    today,
    write_section,
)

SCENARIOS: Final[Mapping[str, Entry]] = {
    "peers": Entry(
        "peers.compare", "Twofold, llama.cpp and ik_llama.cpp on the same random model of a real shape"
    ),
    "layer": Entry("peers.layer", "one MoE layer: Twofold's formats and kt-kernel's methods"),
    "training": Entry("peers.training", "LoRA training beside PEFT on transformers' experts implementations"),
    "agreement": Entry("peers.agreement", "likeliest next tokens beside llama.cpp's, on the same GGUF files"),
    "targets": Entry("targets.all_checks", "the CPU half's targets and whether they are met"),
    "serving": Entry("servers.serving", "tokens per second and latencies over HTTP at 1 to 64 streams"),
    "overload": Entry(
        "servers.overload", "ten times the capacity: are admitted requests served as promised?"
    ),
    "stalls": Entry("servers.stalls", "gaps between tokens with each level of telemetry, and CPU per token"),
    "soak": Entry("servers.soak", "streams that hang up and damaged bodies: does anything leak?"),
    "fleet": Entry("servers.fleet", "the router's cost, and two replicas against one"),
    "ranks": Entry("servers.ranks", "two ranks against one process on the same cores"),
    "placement": Entry("placement", "placement strategies at every share of experts in slots"),
}


def parser_of(name: str, scenario: Scenario, help_text: str) -> argparse.ArgumentParser:
    """A scenario's own flags and those of the runner."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=help_text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for flag, settings in scenario.flags.items():
        parser.add_argument(flag, **settings)
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write that object to a file")
    parser.add_argument(
        "--from-report", type=Path, metavar="FILE", help="measure nothing; show what --report wrote"
    )
    if scenario.markdown is not None:
        parser.add_argument("--markdown", action="store_true", help="print the performance page's table")
        parser.add_argument("--write-docs", action="store_true", help="put it into the performance page")
    return parser


def run(name: str, words: Sequence[str]) -> int:
    """Exit code: 0, 1 where something is worse than it has to be, 2 where nothing could be measured."""
    scenario, help_text = SCENARIOS[name].load()
    parser = parser_of(name, scenario, help_text)
    args = parser.parse_args(words)
    try:
        scenario.check(args)
    except ValueError as error:
        parser.error(str(error))
    try:
        if args.from_report is not None:
            report = _read(args.from_report, name)
        else:
            about = {"scenario": name, "date": today(), "command": command_line([name, *words])}
            about |= {"machine": machine()}
            report = {**about, **scenario.measure(args)}
        if args.report is not None:
            args.report.write_text(json.dumps(report, indent=1), encoding="utf-8")
        table = ""
        if scenario.markdown is not None and (args.markdown or args.write_docs):
            table = f"{machine_line(report)}\n\n{scenario.markdown(report)}"
            if args.write_docs:
                write_section(PERFORMANCE, name, table)
    except (BenchmarkError, TwofoldError, OSError, ValueError) as error:
        say(f"python -m benchmarks {name}: {error}")
        return 2
    print(json.dumps(report, indent=1) if args.json else table or scenario.show(report))
    return int(scenario.failed(report))


def _read(path: Path, name: str) -> Report:
    report = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(report, dict) or report.get("scenario") != name:
        raise ValueError(f"{path} holds no report of `python -m benchmarks {name}`")
    return report


def main(words: Sequence[str] | None = None) -> int:
    name, *rest = [*(sys.argv[1:] if words is None else words), ""]
    if name in SCENARIOS:
        return run(name, rest[:-1])
    listed = "\n".join(f"  {name:<16}{entry.summary}" for name, entry in SCENARIOS.items())
    known = name in ("", "-h", "--help")
    print(f"{__doc__}\n{listed}" if known else f"no benchmark {name!r}; expected one of\n{listed}")
    return 0 if known else 2


if __name__ == "__main__":
    sys.exit(main())
