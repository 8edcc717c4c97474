"""Whether long prompts place experts anew (`--enable-dynamic-expert-update`), and if they do not, why.

The core does it, layer by layer in the prompt's own pass; here it is said what came of each step with prompt tokens.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

_log = logging.getLogger(__name__)

REASONS: Final[Mapping[str, str]] = {
    "updated": "experts were placed anew by the prompt's routing",
    "unchanged": "what the prompt routes most was in slots already",
    "too_few_tokens": "the step had fewer prompt tokens than --gpu-prefill-token-threshold",
    "payback_places": "under --expert-placement-strategy payback the cache policy places experts already; choose "
    "uniform, frequency, front-loading or random",
    "all_resident": "every expert has a slot",
    "no_slots": "there are no expert slots; give --gpu-experts-ratio or --num-gpu-experts",
    "no_accelerator": "the accelerator is none: the CPU runs all experts",
}
"""What a step with prompt tokens came to. All but the first two say why nothing was even tried."""


class DynamicUpdate:
    """Counts what steps with prompt tokens came to, and says each reason once."""

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """
        Args:
            counts: the core's, since the start, of the executor that there is now.
        """
        self._counts = counts
        self._before: Counter[str] = Counter()
        self._said: set[str] = set()
        self.counts: dict[str, int] = {}
        """Steps with prompt tokens by what they came to; only reasons that have occurred. May be read by any thread."""

    def step(self, blocked: str | None) -> None:
        """A step with prompt tokens is done. `blocked`: what has kept the core from looking at it."""
        if blocked is not None:
            self._before[blocked] += 1
        found = self._before + Counter(self._core())
        self.counts = {reason: found[reason] for reason in REASONS if found[reason]}
        for reason in self.counts.keys() - self._said:
            self._said.add(reason)
            acts = reason in ("updated", "unchanged")
            _log.log(
                logging.INFO if acts else logging.WARNING,
                "dynamic expert update %s (%s): %s",
                "acts" if acts else "does not act",
                reason,
                REASONS[reason],
            )

    def keep(self) -> None:
        """The executor goes, its counts stay."""
        self._before += Counter(self._core())

    def _core(self) -> dict[str, int]:
        found = self._counts()
        return {
            "updated": found["updated"],
            "unchanged": found["unchanged"],
            "too_few_tokens": found["too_short"],
        }
