"""What the core declares once: its counters with their meanings, and the options of its layer scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from twofold import _core

COUNTERS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = _core.count_meanings()
"""By group, what is counted and the meaning of each counter (engine/core/include/twofold/counters.h)."""

SCHEDULER_OPTIONS: Final[Mapping[str, _core.SchedulerOption]] = _core.scheduler_options()
"""Options of a layer scheduler by name (engine/core/include/twofold/scheduler_options.h)."""


def meanings(group: str) -> str:
    """What a group counts and its counters, for a help text."""
    what, counters = COUNTERS[group]
    return (
        f"{what[:1].upper()}{what[1:]}: {'; '.join(f'{name} ({text})' for name, text in counters.items())}."
    )
