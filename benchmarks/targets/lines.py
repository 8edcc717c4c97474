"""A line of the report: what was aimed at, what was measured, whether that is enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.peers.shapes import FullShape

Verdict = Literal["pass", "short", "not measured"]


@dataclass(frozen=True)
class Line:
    """One target. `figure` is None if it could not be measured; `note` says why, or what the figure is made of."""

    check: str
    target: str
    figure: float | None
    unit: str
    verdict: Verdict
    note: str = ""


def at_least(check: str, what: str, least: float, figure: float | None, unit: str, note: str = "") -> Line:
    """Passes from `least` on."""
    return _line(
        check,
        f"{what} ≥ {least:g} {unit}".strip(),
        figure,
        unit,
        figure is not None and figure >= least,
        note,
    )


def at_most(check: str, what: str, most: float, figure: float | None, unit: str, note: str = "") -> Line:
    """Passes up to `most`."""
    return _line(
        check, f"{what} ≤ {most:g} {unit}".strip(), figure, unit, figure is not None and figure <= most, note
    )


def not_measured(check: str, target: str, why: str) -> Line:
    return Line(check, target, None, "", "not measured", why)


def _line(check: str, target: str, figure: float | None, unit: str, enough: bool, note: str) -> Line:
    verdict: Verdict = "not measured" if figure is None else "pass" if enough else "short"
    return Line(check, target, figure, unit, verdict, note)


@dataclass(frozen=True)
class Settings:
    """Settings of all checks."""

    cache: Path
    shape: FullShape
    formats: tuple[str, ...]
    threads: int
    rounds: int
    python: str
    llama_python: str
    kt_python: str
    keep_models: bool
    prompt_tokens: int = 512
    new_tokens: int = 32
    seed: int = 0
    say: Callable[[str], None] = field(default=print)


def table(lines: Sequence[Line]) -> str:
    """Lines as a readable table."""
    shown = [f"{'verdict':<14}{'figure':>14}  {'target':<62} note"]
    shown += [f"{line.verdict:<14}{figure_of(line):>14}  {line.target:<62} {line.note}" for line in lines]
    short = sum(line.verdict == "short" for line in lines)
    missing = sum(line.verdict == "not measured" for line in lines)
    shown.append(f"{len(lines) - short - missing} pass, {short} short, {missing} not measured")
    return "\n".join(shown)


def markdown(lines: Sequence[Mapping[str, Any]]) -> str:
    """The same as a Markdown table, from what --json printed."""
    rows = ["| target | measured | verdict | |", "|---|---|---|---|"]
    for line in lines:
        figure = "-" if line["figure"] is None else f"{line['figure']:.3g} {line['unit']}".strip()
        rows.append(f"| {line['target']} | {figure} | {line['verdict']} | {line['note']} |")
    return "\n".join(rows)


def figure_of(line: Line) -> str:
    return "-" if line.figure is None else f"{line.figure:.3g} {line.unit}".strip()
