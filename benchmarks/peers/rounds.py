"""Engines take turns, A B C A B C ..., so that what else the machine does hits all of them; medians and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.engines import TESTS, Engine, PeerError, Round, Workload

OURS: Final = "twofold"


@dataclass(frozen=True)
class Series:
    """tokens/s of every round of one engine in one test; `ratios` are its rounds ÷ Twofold's of the same turn."""

    engine: str
    format: str
    test: str
    """pp512, tg32, ...: what was measured and how many tokens."""
    samples: list[float]
    ratios: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile; the only sample twice, if there is one only."""
        return quartiles(self.samples)


@dataclass(frozen=True)
class Outcome:
    """All series of one format, and the engines left out, with reasons."""

    series: list[Series]
    left_out: dict[str, str]
    details: dict[str, dict[str, Any]]


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    if len(samples) < 2:
        return samples[0], samples[0]
    cuts = statistics.quantiles(samples, n=4, method="inclusive")
    return cuts[0], cuts[2]


def alternate(
    engines: Sequence[Engine],
    model: Path,
    work: Workload,
    format_name: str,
    num_rounds: int,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Measure `num_rounds` rounds of every engine in turn. An engine that fails is left out from then on, and named."""
    rounds: dict[str, list[Round | None]] = {engine.name: [] for engine in engines}
    left_out: dict[str, str] = {}
    for turn in range(num_rounds):
        for engine in engines:
            if engine.name in left_out:
                continue
            try:
                measured = engine.measure(model, work)
            except PeerError as error:
                left_out[engine.name] = str(error)
                say(f"{format_name}: {engine.name} is left out: {error}")
                continue
            rounds[engine.name].append(measured)
            say(
                f"{format_name} round {turn + 1}/{num_rounds} {engine.name}: "
                f"pp{work.prompt_tokens} {measured.pp:.1f}, tg{work.new_tokens} {measured.tg:.1f} tokens/s"
            )
    series = []
    details = {}
    for engine in engines:
        done = [r for r in rounds[engine.name] if r is not None]
        if not done:
            continue
        details[engine.name] = done[-1].details
        for test in TESTS:
            length = work.prompt_tokens if test == "pp" else work.new_tokens
            samples = [getattr(r, test) for r in done]
            ours = [getattr(r, test) for r in rounds.get(OURS, []) if r is not None]
            # An engine that fell out has fewer rounds than ours: those of the same turns are compared.
            ratios = [theirs / mine for theirs, mine in zip(samples, ours, strict=False)]
            series.append(Series(engine.name, format_name, f"{test}{length}", samples, ratios))
    return Outcome(series, left_out, details)


def rows(series: Sequence[Series]) -> list[dict[str, Any]]:
    """The list that --json prints. The ratio is median ÷ Twofold's median, null where Twofold was not measured."""
    ours = {(s.format, s.test): s.median for s in series if s.engine == OURS}
    listed = []
    for one in series:
        mine = ours.get((one.format, one.test))
        listed.append(
            {
                "engine": one.engine,
                "format": one.format,
                "test": one.test,
                "tokens_per_s": one.median,
                "ratio_to_twofold": one.median / mine if mine else None,
            }
        )
    return listed
