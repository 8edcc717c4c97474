"""Scenarios: their interface to the runner, and shared parts: flags, the machine's description, medians, tables."""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from twofold.blocks import ops

from benchmarks.models.shapes import FULL_SHAPES

ROOT: Final = Path(__file__).resolve().parents[1]
PERFORMANCE: Final = ROOT / "docs" / "explanation" / "performance.md"
BEGIN: Final = "<!-- {name}: made by {maker} -->"
END: Final = "<!-- end of {name} -->"
Report = dict[str, Any]
"""Results of a scenario, as in JSON. The runner adds date, command and machine."""


@dataclass(frozen=True)
class Scenario:
    """One benchmark; `python -m benchmarks NAME` runs it."""

    measure: Callable[[argparse.Namespace], Report]
    """Raises BenchmarkError, OSError or ValueError where it cannot."""
    show: Callable[[Report], str]
    """The report as readable text."""
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arguments of `add_argument` by flag; `common` has those that several scenarios take."""
    check: Callable[[argparse.Namespace], None] = lambda args: None
    """Completes the arguments; ValueError where they do not fit together."""
    markdown: Callable[[Report], str] | None = None
    """Table for the performance page, which --write-docs replaces."""
    failed: Callable[[Report], bool] = lambda report: False
    """Whether something is worse than it has to be: exit code 1."""


@dataclass(frozen=True)
class Entry:
    """A row of the table of scenarios."""

    module: str
    """Module of `benchmarks` with the `SCENARIO`; its docstring is the help."""
    summary: str

    def load(self) -> tuple[Scenario, str]:
        module = importlib.import_module(f"benchmarks.{self.module}")
        return module.SCENARIO, module.__doc__ or self.summary


class BenchmarkError(Exception):
    """Something cannot be measured. The message says why and what to do."""


def positive(text: str) -> int:
    """A number of 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} was given; it takes 1 or more")
    return number


def numbers(text: str) -> list[int]:
    """Numbers of 1 or more, with commas between them."""
    return [positive(part) for part in text.split(",")]


def _interpreter_with(package: str) -> Mapping[str, Any]:
    """A flag that names the interpreter of another engine; by default the one of this program."""
    return {"default": sys.executable, "metavar": "PATH", "help": f"interpreter with {package}"}


_COMMON: Final[Mapping[str, Mapping[str, Any]]] = {
    "--shape": {"choices": FULL_SHAPES, "default": "qwen3-30b-a3b"},
    "--layers": {"type": positive, "default": 6, "help": "of the shape's (default: 6)"},
    "--cache": {"type": Path, "help": "directory for random models; needed to measure"},
    "--rounds": {"type": positive, "default": 5, "help": "turns of everything compared (default: 5)"},
    "--threads": {"type": positive, "default": None, "help": "default: physical cores"},
    "--prompt-tokens": {"type": positive, "default": 512},
    "--new-tokens": {"type": positive, "default": 32},
    "--seed": {"type": int, "default": 0, "help": "of weights and prompts"},
    "--twofold-python": _interpreter_with("twofold"),
    "--llama-python": _interpreter_with("llama-cpp-python"),
    "--ik-python": _interpreter_with("ik-llama-cpp-python"),
    "--kt-python": _interpreter_with("kt-kernel and torch"),
    "--accelerator": {"default": "none"},
    "--against": {"type": Path, "metavar": "DIR", "help": "a second checkout, built, measured in turn"},
}


def common(*names: str) -> dict[str, Mapping[str, Any]]:
    """Flags that several scenarios take."""
    return {name: _COMMON[name] for name in names}


def check_model_flags(args: argparse.Namespace) -> None:
    """--cache, --layers and --threads of a scenario that writes random models."""
    if args.from_report is None and args.cache is None:
        raise ValueError("--cache DIR is needed: where the random models are written")
    if args.layers > FULL_SHAPES[args.shape].layers:
        raise ValueError(
            f"--layers was given {args.layers}; {args.shape} has {FULL_SHAPES[args.shape].layers}"
        )
    args.threads = args.threads or physical_cores()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- the machine that figures come from ------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """CPU, physical cores that this process may use, memory and the load average when it was asked."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_name(),
        "cores": physical_cores(),
        "memory_gib": memory_bytes / 2**30,
        "load_average": os.getloadavg()[0],
    }


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def command_line(words: Iterable[str]) -> str:
    """The command of a run, with absolute paths cut to their last part."""
    return " ".join(["python -m benchmarks", *(_shortened(word) for word in words)])


def _shortened(word: str) -> str:
    flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    return f"{flag}{equals}…/{Path(value).name}" if value.startswith("/") else word


def _cpu_name() -> str:
    """Name, family and model of the first core."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    fields = dict(re.findall(r"^(.+?)\s*: (.+)$", text, re.MULTILINE))
    family = f" family {fields['cpu family']} model {fields['model']}" if "cpu family" in fields else ""
    return f"{fields.get('model name', 'unknown CPU')}{family}"


def physical_cores() -> int:
    """Cores that this process may use, as the engine counts them: threads of one core count once."""
    return ops.ThreadPool(0).num_threads


# ---- figures and tables ----------------------------------------------------------------------------------------------


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """Lower and upper quartile; the only sample twice, if there is one only."""
    if len(samples) < 2:
        return samples[0], samples[0]
    cuts = statistics.quantiles(samples, n=4, method="inclusive")
    return cuts[0], cuts[2]


def median_cell(samples: Sequence[float], digits: int = 1) -> str:
    """The median with the quartiles in brackets."""
    low, high = quartiles(samples)
    return f"{statistics.median(samples):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def without_directories(text: str) -> str:
    """Absolute paths cut to their last part: they say nothing to another machine."""
    return re.sub(r"(?<![\w….])/(?:[^\s/:;,'\"]+/)+([^\s/:;,'\"]+)", r"…/\1", text)


def machine_line(report: Mapping[str, Any]) -> str:
    """When, where and by which command."""
    of = report["machine"]
    return f"{report['date']}, {of['cpu']}, {of['cores']} cores, {of['memory_gib']:.0f} GiB: `{report['command']}`"


def write_section(path: Path, name: str, body: str) -> None:
    """Replace what stands between the two markers of scenario `name` in the file. ValueError if it lacks them."""
    text = path.read_text(encoding="utf-8")
    begin, end = section_marks(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{path} has not exactly one section between {begin!r} and {end!r}")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    path.write_text(f"{before}{begin}\n{body.strip()}\n{end}{after}", encoding="utf-8")


def section_marks(name: str) -> tuple[str, str]:
    """First and last line of a scenario's section of the performance page."""
    return BEGIN.format(name=name, maker=f"python -m benchmarks {name} --write-docs"), END.format(name=name)
