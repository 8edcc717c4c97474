"""Page of what the core declares: the layer scheduler's options and the counters of its decisions."""

from __future__ import annotations

from twofold.api.config import EngineConfig
from twofold.api.core_tables import COUNTERS, SCHEDULER_OPTIONS

from scripts.reference.tables import cell, table


def scheduler() -> str:
    flags = EngineConfig().scheduler_options
    parts = [
        "Options of the layer scheduler (`twofold._core.SchedulerConfig`). `twofold serve` has flags for some; the lab "
        "and comparisons with other engines set the others.",
        table(
            ("option", "default", "range", "flag", "meaning"),
            [
                (
                    f"`{name}`",
                    f"`{option['default']}`",
                    _range(option["low"], option["high"]),
                    f"`--{name.replace('_', '-')}`" if name in flags else "",
                    cell(option["help"]),
                )
                for name, option in SCHEDULER_OPTIONS.items()
            ],
        ),
        "## Counters",
        "Sums since the start, in `Engine.stats()` and [metrics](metrics.md).",
    ]
    for group, (what, counters) in COUNTERS.items():
        parts += [f"### {group}", f"{what[0].upper()}{what[1:]}."]
        parts.append(
            table(("counter", "meaning"), [(f"`{name}`", cell(text)) for name, text in counters.items()])
        )
    return "\n\n".join(parts)


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return ""
    return f"{low} or more" if high is None else f"{low} to {high}"
