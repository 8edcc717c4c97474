"""Finds the highest arrival rate at which a server holds its objectives: doubling, then bisection.

The search measures nothing itself. It is bounded: by `max_runs`, by the highest rate, and by `tolerance`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

Measure = Callable[[float, int], Awaitable[bool]]
"""(rate, number of the repetition) -> whether the objectives were held."""


@dataclass(frozen=True)
class Search:
    """Limits of the search; rates are conversations per second."""

    low: float
    high: float
    tolerance: float = 0.05
    """The result is at most this share below the lowest rate that missed."""
    repeats: int = 3
    """Measurements of one rate; the majority decides."""
    max_runs: int = 60


@dataclass
class Capacity:
    """Result of a search."""

    held: float | None = None
    """Highest rate that held; None if the lowest missed."""
    missed: float | None = None
    """Lowest rate that missed; None if the highest held."""
    num_runs: int = 0
    complete: bool = True
    """False if `max_runs` ended the search before its tolerance."""
    verdicts: list[tuple[float, bool]] = field(default_factory=list)


async def highest_rate(measure: Measure, search: Search) -> Capacity:
    """Search between `search.low` and `search.high`."""
    found = Capacity()
    rate = search.low
    while True:
        if found.num_runs + search.repeats > search.max_runs:
            found.complete = False
            return found
        if await _holds(measure, rate, search.repeats, found):
            found.held = rate
        else:
            found.missed = rate
        if found.held is None or found.held >= search.high:
            return found
        if found.missed is None:
            rate = min(2 * rate, search.high)
        elif found.missed <= found.held * (1 + search.tolerance):
            return found
        else:
            rate = math.sqrt(found.held * found.missed)


async def _holds(measure: Measure, rate: float, repeats: int, found: Capacity) -> bool:
    """The majority of up to `repeats` measurements, which end as soon as it is certain."""
    votes = {True: 0, False: 0}
    for repetition in range(repeats):
        votes[await measure(rate, repetition)] += 1
        found.num_runs += 1
        if max(votes.values()) > repeats // 2:
            break
    held = votes[True] > votes[False]
    found.verdicts.append((rate, held))
    return held
