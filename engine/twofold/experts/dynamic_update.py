"""Outcomes of dynamic expert updates by long prompts (`--enable-dynamic-expert-update`).

The core does the updates, layer by layer in the prompt's own pass; this module reports the outcome of each step with
prompt tokens, or why there was no update.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from twofold.api.core_tables import COUNTERS

_log = logging.getLogger(__name__)

REASONS: Final[Mapping[str, str]] = {
    **COUNTERS["dynamic_update"][1],
    "payback_places": "under --expert-placement-strategy payback the cache policy already moves experts; choose "
    "uniform, frequency, front-loading or random",
    "all_resident": "every expert has a slot",
    "no_slots": "there are no expert slots; give --gpu-experts-ratio or --num-gpu-experts",
    "no_accelerator": "the accelerator is none: the CPU runs all experts",
}
"""Outcomes of a step with prompt tokens. All but the first two are reasons why no update was tried."""


class DynamicUpdate:
    """Counts outcomes of steps with prompt tokens, and logs each reason once."""

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """counts: returns the core's counts since the start."""
        self._counts = counts
        self._blocked: Counter[str] = Counter()
        self._logged: set[str] = set()
        self.counts: dict[str, int] = {}
        """Steps with prompt tokens by outcome; only those that have occurred. May be read by any thread."""

    def step(self, blocked: str | None) -> None:
        """Record a finished step with prompt tokens. `blocked`: the reason why the core did not consider it."""
        if blocked is not None:
            self._blocked[blocked] += 1
        found = self._blocked + Counter(self._counts())
        self.counts = {reason: found[reason] for reason in REASONS if found[reason]}
        for reason in self.counts.keys() - self._logged:
            self._logged.add(reason)
            acts = reason in ("updated", "unchanged")
            _log.log(
                logging.INFO if acts else logging.WARNING,
                "dynamic expert update %s (%s): %s",
                "is active" if acts else "is inactive",
                reason,
                REASONS[reason],
            )
