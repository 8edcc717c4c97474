"""A line of the report: what was aimed at, what was measured, whether that is enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.models.gguf_model import cached_model
from benchmarks.models.shapes import FullShape
from benchmarks.peers.engines import Workload
from benchmarks.scenario import markdown_table

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


@dataclass(frozen=True)
class Target:
    """A bound of a check."""

    check: str
    what: str
    relation: Literal["≥", "≤"]
    bound: float
    unit: str

    def line(self, figure: float | None, note: str = "") -> Line:
        """The bound itself passes."""
        enough = figure is not None and (
            figure >= self.bound if self.relation == "≥" else figure <= self.bound
        )
        verdict: Verdict = "not measured" if figure is None else "pass" if enough else "short"
        target = f"{self.what} {self.relation} {self.bound:g} {self.unit}".strip()
        return Line(self.check, target, figure, self.unit, verdict, note)


def at_least(check: str, what: str, least: float, unit: str) -> Target:
    return Target(check, what, "≥", least, unit)


def at_most(check: str, what: str, most: float, unit: str) -> Target:
    return Target(check, what, "≤", most, unit)


def not_measured(check: str, target: str, why: str) -> Line:
    return Line(check, target, None, "", "not measured", why)


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
    keep_models: bool
    prompt_tokens: int = 512
    new_tokens: int = 32
    seed: int = 0

    @property
    def workload(self) -> Workload:
        return Workload(
            self.prompt_tokens, self.new_tokens, 3, self.threads, seed=self.seed, vocab=self.shape.vocab
        )

    def random_model(self, format_name: str) -> AbstractContextManager[Path]:
        """The model's file: from the cache, or made now and deleted afterwards unless it is to be kept."""
        return cached_model(self.cache, self.shape, format_name, self.seed, keep=self.keep_models)


def markdown(lines: Sequence[Mapping[str, Any]]) -> str:
    """Lines as a table."""
    rows = []
    for line in lines:
        figure = "-" if line["figure"] is None else f"{line['figure']:.3g} {line['unit']}".strip()
        rows.append((line["target"], figure, line["verdict"], line["note"]))
    return markdown_table(("target", "measured", "verdict", ""), rows)
