"""How often a live page refreshes: as rarely as it takes to keep a viewer cheap on the machine that is watched."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final

from dashboard.view import REFRESH_S

_INTERVALS_S: Final = (REFRESH_S, 3.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0)
_MOST_CORES: Final = 0.02
"""Share of a core that drawing a page may take; sending it and its garbage take up to as much again."""


def interval_s(state: MutableMapping[Any, Any], page: str) -> float:
    """Seconds from one refresh of a page to the next, for this viewer."""
    return float(state.get(f"interval-{page}", REFRESH_S))


def slow_down(state: MutableMapping[Any, Any], page: str, cpu_s: float) -> bool:
    """Take in what one refresh took of a core; whether the interval became longer.

    The cheaper of two refreshes counts, because the first one fills caches.
    """
    before, state[f"cost-{page}"] = state.get(f"cost-{page}"), cpu_s
    if before is None:
        return False
    cost_s = min(before, cpu_s)
    wanted = next((each for each in _INTERVALS_S if cost_s <= _MOST_CORES * each), _INTERVALS_S[-1])
    if wanted <= interval_s(state, page):
        return False
    state[f"interval-{page}"] = wanted
    return True
